"""The parts of a policy in this process, opened without an event loop."""

# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from envkit import config
from envkit.config import RunConfig
from envkit.config.parts import AutoRendererSection, RendererSection, TransformersEngineSection
from envkit.trainer_bridge.algorithms.algorithm import Algorithm
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.trainers.torch_local import TorchTrainer
from envkit.types import JSON, Place
from envkit.wiring.contexts import EngineContext, Model, RendererContext, TrainerContext
from envkit.wiring.launch.local import LocalLauncher
from envkit.wiring.launch.placement import DeviceMap
from envkit.wiring.training.models import locate
from envkit.wiring.training.policy import Policy, playing_threads
from envkit.wiring.training.resolve import policy_kind, resolve
from envkit.wiring.training.torch_parts import (
    find_model,
    new_tiny_policy,
    open_renderer,
    open_torch_local,
    open_transformers,
)


@dataclass
class LocalPolicy(Policy):
    """The engine ``transformers`` and the trainer ``torch_local``, and the model that is trained."""

    engine: TransformersEngine
    trainer: TorchTrainer
    tokenizer: Any

    @property
    def model(self) -> Any:
        return self.trainer._model


def open_policy(run: RunConfig) -> LocalPolicy:
    """The policy of a resolved training file."""
    section = run.engine
    assert isinstance(section, TransformersEngineSection)
    with TemporaryDirectory() as scratch:
        if section.model is None:
            with ThreadPoolExecutor(1) as thread:  # as in a run, whose event loop occupies the main thread
                model = thread.submit(new_tiny_policy, run, section, Path(scratch)).result()
        else:
            model = find_model(locate(section.model), policy_kind(run))
        return _opened(run, section, model, run.renderer, playing_threads(run))


def load_policy(
    path: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 0,
    renderer: RendererSection | None = None,
) -> LocalPolicy:
    """The policy of a model folder or a hub model."""
    content: Mapping[str, JSON] = {
        "env": {"id": "FrozenLake-v0"},
        "engine": {"model": path, "device": device, "dtype": dtype},
        "trainer": {"device": device},
    }
    run = resolve(config.parse(content))
    assert isinstance(run.engine, TransformersEngineSection)
    return _opened(run, run.engine, find_model(path), renderer or AutoRendererSection(), threads)


def _opened(
    run: RunConfig, section: TransformersEngineSection, model: Model, renderer: RendererSection, threads: int
) -> LocalPolicy:
    engine = open_transformers(
        EngineContext(section=section, model=model, max_tokens=run.rollout.max_tokens, threads=threads, seed=run.seed)
    )
    trainer = open_torch_local(
        TrainerContext(
            section=run.trainer,
            model=model,
            algorithm=Algorithm.of(run.algorithm),
            engine=engine,
            folder=Path("unused"),
            temperature=run.rollout.temperature,
            threads=run.threads,
            seed=run.seed,
        )
    )
    opened = open_renderer(RendererContext(section=renderer, model=model))
    placed = DeviceMap(Place(), ())
    return LocalPolicy(engine, trainer, opened, engine.description, LocalLauncher(), placed, model.tokenizer)
