"""Opens the parts of a run that a training file chooses by kind: model, renderer, engine and trainer.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from envkit import clock
from envkit.config import RunConfig
from envkit.config.parts import TransformersEngineSection
from envkit.errors import UsageError
from envkit.protocols import Launcher, PhasedTrainer, PolicyEngine, Renderer, Trainer
from envkit.trainer_bridge.algorithms.algorithm import Algorithm
from envkit.wiring.contexts import EngineContext, Model, RendererContext, TrainerContext, open_part
from envkit.wiring.launch import open_launcher
from envkit.wiring.launch.local import LocalLauncher
from envkit.wiring.launch.placement import DeviceMap, place_run
from envkit.wiring.training.models import locate
from envkit.wiring.training.resolve import policy_kind


@dataclass(slots=True)
class Policy:
    """The parts of a training run that hold or read the policy.

    `description` is one line, `launcher` starts the processes of the run, and `placed` says where they are.
    """

    engine: PolicyEngine
    trainer: Trainer
    renderer: Renderer
    description: str
    launcher: Launcher
    placed: DeviceMap


@asynccontextmanager
async def open_policy(
    run: RunConfig, *, folder: Path, threads: int, announce: Callable[[str], None] = lambda line: None
) -> AsyncIterator[Policy]:
    """Open the model, renderer, engine and trainer of a resolved run. The same file always gives the same policy.

    Weights on their way to the engine are in `folder`, which need not exist. `threads` are those for learning.
    """
    launcher = await open_launcher(run.placement.launcher)
    placed = await clock.to_thread(place_run, run, launcher.nodes)
    if run.placement.launcher != "local" or any(node.gpus for node in launcher.nodes):
        announce(f"placement: {placed}")
    async with AsyncExitStack() as parts:
        with TemporaryDirectory(prefix="envkit-") as scratch:
            model = await clock.to_thread(_model_of, run, Path(scratch))
            renderer = await open_renderer(parts, run, model)
            engine = await open_engine(parts, run, model, announce, launcher=launcher, placed=placed)
            context = TrainerContext(
                section=run.trainer,
                model=model,
                algorithm=Algorithm.of(run.algorithm),
                engine=engine,
                folder=folder,
                temperature=run.rollout.temperature,
                threads=threads,
                seed=run.seed,
                imitation_rate=run.imitation.learning_rate or 0.0,
                place=placed.trainer,
            )
            trainer: Trainer = await open_part(parts, "trainers", run.trainer.kind, context)
        if run.imitation.kind != "none" and not isinstance(trainer, PhasedTrainer):
            raise UsageError(
                f"imitation.kind: the trainer {run.trainer.kind} cannot imitate; use none, and name a model"
            )
        about = getattr(engine, "description", f"engine {run.engine.kind}")
        kind = "" if model is None else "tiny policy, " if model.kind == "tiny" else "pretrained "
        lines = [f"{kind}{about}", getattr(trainer, "description", "")]
        yield Policy(engine, trainer, renderer, ", ".join(filter(None, lines)), launcher, placed)


def _model_of(run: RunConfig, scratch: Path) -> Model | None:
    """Find the model of a run, or create a tiny policy in the folder `scratch`. Return None if the engine has neither.

    torch is imported only if there is a model.
    """
    section = run.engine
    if section.model is not None:
        from envkit.wiring.training.torch_parts import find_model

        return find_model(locate(section.model), policy_kind(run))
    if isinstance(section, TransformersEngineSection):
        from envkit.wiring.training.torch_parts import new_tiny_policy

        return new_tiny_policy(run, section, scratch)
    return None


async def open_renderer(parts: AsyncExitStack, run: RunConfig, model: Model | None) -> Renderer:
    """Open the renderer that the section ``renderer`` chooses."""
    context = RendererContext(section=run.renderer, model=model)
    renderer: Renderer = await open_part(parts, "renderers", run.renderer.kind, context)
    return renderer


async def open_engine(
    parts: AsyncExitStack,
    run: RunConfig,
    model: Model | None,
    announce: Callable[[str], None] = lambda line: None,
    *,
    launcher: Launcher | None = None,
    placed: DeviceMap | None = None,
) -> PolicyEngine:
    """Open the engine that the section ``engine`` chooses. Without a launcher and a map, it has this machine."""
    launcher = launcher or LocalLauncher()
    if placed is None:
        placed = await clock.to_thread(partial(place_run, run, launcher.nodes, trains=False))
    lora = getattr(run.trainer, "lora", None)
    context = EngineContext(
        section=run.engine,
        model=model,
        max_tokens=run.rollout.max_tokens,
        threads=playing_threads(run),
        seed=run.seed,
        lora_rank=0 if lora is None else lora.rank,
        announce=announce,
        launcher=launcher,
        places=placed.engines or (placed.trainer,),
    )
    engine: PolicyEngine = await open_part(parts, "engines", run.engine.kind, context)
    return engine


def playing_threads(run: RunConfig) -> int:
    """Return the number of torch threads that generate answers; 0 keeps torch's setting.

    The default for a tiny policy is one thread, because its matrices are small: on idle cores a second thread gains
    nothing, and on busy cores every forward pass waits for the second thread.
    """
    return run.threads or (1 if policy_kind(run) == "tiny" else 0)
