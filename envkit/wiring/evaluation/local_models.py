"""Evaluation of language models in this process: checkpoints of envkit, and other models for transformers."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from envkit import clock, config
from envkit.config import RunConfig
from envkit.config.parts import TransformersEngineSection, VllmEngineSection
from envkit.errors import UsageError
from envkit.protocols import Engine, EnvHost, Renderer
from envkit.runs.episodes import episode_of
from envkit.trainer_bridge.evaluation.advice import Limits
from envkit.trainer_bridge.models.catalogue import is_model
from envkit.trainer_bridge.models.saved_policy import SavedPolicy
from envkit.trainer_bridge.rollout import Rollout
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.run_folder.record import refuse_other_format
from envkit.types import Options, Task, Trajectory
from envkit.wiring.evaluation.players import OnEpisode, Playing
from envkit.wiring.training.models import check_length, locate
from envkit.wiring.training.policy import open_engine, open_renderer
from envkit.wiring.training.resolve import is_tiny, limits_of, resolve

BATCH = 16
"""Default number of concurrent episodes of a model that is not a checkpoint."""
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".json", ".jinja")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that has been found but is not loaded yet.

    Attributes:
        path: Model folder, file, or name on the hub.
        run: Settings with which the model plays.
        greedy: Whether the model always chooses the most likely token.
        batch: Number of concurrent episodes.
    """

    path: str
    run: RunConfig
    greedy: bool
    batch: int

    @classmethod
    def of_checkpoint(cls, folder: Path, playing: Playing, *, seed: int) -> LocalModel:
        """Find a checkpoint: `folder` itself, or the newest checkpoint of the run in `folder`.

        Raises:
            UsageError: There is no checkpoint, or the run's folder has a format of another version of envkit.
        """
        found = checkpoint.latest(folder / "checkpoints") if (folder / "checkpoints").is_dir() else folder
        if not is_model(found / "policy"):
            raise UsageError(f"{folder}: neither a run's folder nor a checkpoint; name a run, such as runs/NAME")
        refuse_other_format(found.parent.parent)
        run = config.load(found.parent.parent / "config.yaml")
        # Load all weights from the checkpoint, because the model that the run started from may have been deleted.
        if isinstance(run.engine, VllmEngineSection):  # its servers may have other weights by now
            device = run.engine.device
            run = run.model_copy(
                update={"engine": TransformersEngineSection(model=str(found / "policy"), device=device)}
            )
            run = resolve(run)
        elif run.engine.model is not None:
            run = run.model_copy(update={"engine": run.engine.model_copy(update={"model": str(found / "policy")})})
        batch = playing.batch or run.num_envs
        return cls(str(found / "policy"), _changed(run, playing, seed), greedy=playing.temperature == 0, batch=batch)

    @classmethod
    def of_name(cls, name: str, env_id: str, playing: Playing, *, seed: int) -> LocalModel:
        """Find a model by its folder, file or name. It plays with the default settings of training files.

        Raises:
            UsageError: There is no such model on this machine.
            ConfigError: The policy file in the model's folder is damaged or has an unknown format.
        """
        content: dict[str, Any] = {"env": {"id": env_id}, "engine": {"model": name}}
        run = _changed(resolve(config.parse(content)), playing, seed)
        return cls(locate(name), run, greedy=playing.temperature == 0, batch=playing.batch or BATCH)

    @property
    def identity(self) -> str:
        """Fingerprint of the model's files; empty if the model is on the hub."""
        path = Path(self.path)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [(one.name, one.stat()) for one in files if one.suffix in _WEIGHTS and one.is_file()]
        digest = hashlib.sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]).encode())
        return f"{self.path} {digest.hexdigest()[:16]}" if found else ""

    @property
    def limits(self) -> Limits:
        limits = limits_of(self.run)
        return Limits(limits.turn_tokens, limits.max_turns, limits.max_tokens)

    def options_for(self, env_id: str) -> Options:
        """Return the options of the training's first environment with id `env_id`; empty if it had none."""
        return next((section.options for section in self.run.envs if section.id == env_id), {})

    def mismatch(self, env_id: str) -> str:
        """Return a warning if the policy was trained on another environment, otherwise an empty string."""
        saved, limits = SavedPolicy.read(Path(self.path)), limits_of(self.run)
        trained_on = [section.id for section in self.run.envs] if saved is None else saved.env_ids
        if env_id in trained_on:
            return ""
        return (
            f"warning: the policy was trained on {', '.join(trained_on)} and plays {env_id} within these limits: "
            f"--max-turns {limits.max_turns}, --max-tokens {limits.max_tokens}, --turn-tokens {limits.turn_tokens}"
        )

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LocalPlayer]:
        """Load the model and yield a player."""
        from envkit.wiring.training.torch_parts import find_model

        async with AsyncExitStack() as parts:
            model = await clock.to_thread(partial(find_model, self.path, is_tiny=is_tiny(self.run)))
            renderer = await open_renderer(parts, self.run, model)
            engine = await open_engine(parts, self.run, model)
            yield LocalPlayer(engine, renderer, self.run, self.greedy, self.batch)


@dataclass(frozen=True, slots=True)
class LocalPlayer:
    """Plays episodes with a model in this process. The model answers the turns of parallel episodes in batches."""

    engine: Engine
    renderer: Renderer
    run: RunConfig
    greedy: bool
    batch: int

    async def play(
        self,
        host: EnvHost,
        tasks: Sequence[Task],
        *,
        attempts: int,
        on_episode: OnEpisode,
        skip: Container[tuple[int, int]],
    ) -> None:
        """Play every task `attempts` times; see `players.play` for the arguments. Void episodes are played again."""
        run = self.run
        renderer = self.renderer
        numbers = {id(task): number for number, task in enumerate(tasks)}
        rollout = Rollout(host, self.engine, renderer, limits_of(run), self.batch)

        def ended(trajectory: Trajectory) -> None:
            on_episode(episode_of(trajectory, index=numbers[id(trajectory.task)], decode=renderer.text))

        temperature = 0.0 if self.greedy else run.rollout.temperature
        seed = run.evaluation.seed
        await rollout.groups(
            tasks, attempts, phase="eval", temperature=temperature, seed=seed, on_episode=ended, skip=skip
        )


def _changed(run: RunConfig, playing: Playing, seed: int) -> RunConfig:
    """Return a copy of `run` with the settings of `playing` and the seed of the evaluation."""
    rollout = {
        name: value
        for name in ("turn_tokens", "max_turns", "max_tokens", "temperature")
        if (value := getattr(playing, name))
    }
    if playing.max_tokens and run.engine.model is not None and not is_tiny(run):
        check_length(run.engine.model, playing.max_tokens)
    keys = {"system": playing.system, "thinking": playing.thinking, "history": playing.history}
    renderer = {key: value for key, value in keys.items() if value is not None}
    for key in renderer:
        if key not in type(run.renderer).model_fields:
            raise UsageError(f"--{key}: the renderer {run.renderer.kind} has no such setting; leave it out")
    return run.model_copy(
        update={
            "renderer": run.renderer.model_copy(update=renderer),
            "engine": run.engine.model_copy(update={"device": playing.device or run.engine.device}),
            "rollout": run.rollout.model_copy(update=rollout),
            "evaluation": run.evaluation.model_copy(update={"seed": seed}),
        }
    )
