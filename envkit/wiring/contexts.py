"""Arguments of the function `open` of a kind, one class per family; see `envkit.config.kinds` and `docs/extend.md`.

`section` is the section of the family in the file, and `announce` shows a line to the user. This module does not import
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from envkit import clock
from envkit.config import kinds
from envkit.config.parts import EngineSection, RendererSection, SandboxSection, TrackerSection, TrainerSection
from envkit.protocols import Launcher, PolicyEngine
from envkit.trainer_bridge.algorithms.algorithm import Algorithm
from envkit.types import JSON, Options, Place
from envkit.wiring.launch.local import LocalLauncher

PolicyKind: TypeAlias = Literal["tiny", "pretrained"]


@dataclass(frozen=True, slots=True)
class Model:
    """The model that a run starts from.

    Attributes:
        path: Model folder, or name of a model on the hub. The folder of a new tiny policy exists until the engine and
            the trainer are open.
        tokenizer: Its Hugging Face tokenizer.
        is_local: Whether to use only files on this machine, including cached models from the hub.
    """

    path: str
    tokenizer: Any
    kind: PolicyKind = "pretrained"
    is_local: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererContext:
    """For the group ``envkit.renderers``, whose `open` returns a `Renderer`.

    Attributes:
        model: The model; None if ``engine.model`` is null and the engine does not create one.
    """

    section: RendererSection
    model: Model | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """For the group ``envkit.engines``, whose `open` returns a `PolicyEngine`.

    Attributes:
        model: As in `RendererContext`.
        max_tokens: Maximum length of a prompt and its completion in tokens.
        threads: Number of threads for sampling; 0 leaves the number unchanged.
        seed: Seed of the run. Each request has a seed of its own in its sampling parameters.
        lora_rank: Rank of the LoRA adapter that the trainer trains; 0 if it trains all weights.
        launcher: Starts the processes of the engine.
        places: Where they run; for an engine in this process, the place of the trainer. Empty: envkit chose none.
    """

    section: EngineSection
    model: Model | None
    max_tokens: int
    threads: int
    seed: int
    lora_rank: int = 0
    announce: Callable[[str], None] = lambda line: None
    launcher: Launcher = field(default_factory=LocalLauncher)
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerContext:
    """For the group ``envkit.trainers``, whose `open` returns a `Trainer`.

    Attributes:
        model: As in `RendererContext`.
        engine: The open engine, which the trainer's weights are for.
        folder: Folder for the files of `Trainer.publish`; it need not exist.
        temperature: Temperature at which the samples are drawn.
        imitation_rate: Learning rate of a phase of imitation.
        place: Where the trainer is: its GPUs, by index among those that are visible to this process.
    """

    section: TrainerSection
    model: Model | None
    algorithm: Algorithm
    engine: PolicyEngine
    folder: Path
    temperature: float
    threads: int
    seed: int
    imitation_rate: float = 0.0
    place: Place = field(default_factory=Place)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxContext:
    """For the group ``envkit.sandboxes``, whose `open` returns a `SandboxBackend`."""

    section: SandboxSection
    announce: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerContext:
    """For the group ``envkit.trackers``, whose `open` returns a `Tracker`.

    Attributes:
        section: The entry of ``tracking.to``.
        folder: Folder of the run.
        first_step: First train step that will be recorded: 0 for a new run. A resumed run repeats the steps from
            `first_step` on.
        config: The whole training file, with defaults.
    """

    section: TrackerSection
    folder: Path
    first_step: int
    config: Mapping[str, JSON]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerContext:
    """For the group ``envkit.policies``, whose `open` returns a `Player`.

    `name` is what follows the colon in ``--policy KIND:NAME``, and empty without a colon.
    """

    name: str
    env_id: str
    options: Options


async def open_part(stack: AsyncExitStack, family: str, name: str, context: object) -> Any:
    """Open a part and return it. If it is an async context manager, it stays entered until `stack` is closed.

    `open` runs in a thread, because it may load a model.

    Raises:
        UsageError: There is no such kind, or its package cannot be imported.
    """
    made = await clock.to_thread(kinds.find(family, name).open, context)
    return await stack.enter_async_context(made) if isinstance(made, AbstractAsyncContextManager) else made
