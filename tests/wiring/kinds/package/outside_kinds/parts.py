"""Parts of a run that envkit does not know, without torch.

The policy is a number for each move, the weight of that move in a draw. The trainer raises the weights of rewarded
moves and publishes them in a JSON file, which the engine reads.
"""

# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio
from pydantic import Field

from envkit import AgentTask
from envkit.config.grammar import Section
from envkit.config.parts import EngineSection, RendererSection, SandboxSection, TrainerSection
from envkit.sandbox import ProcessBackend
from envkit.types import (
    Completion,
    EngineHealth,
    Exchange,
    FinishReason,
    Floats,
    Observation,
    PauseMode,
    Prompt,
    Reset,
    Sample,
    SamplingParams,
    Weights,
    floats,
    ints,
)
from envkit.wiring.contexts import (
    EngineContext,
    RendererContext,
    SandboxContext,
    TrainerContext,
)

NAMES = ("up", "down", "left", "right")


@dataclass(frozen=True)
class Kind:
    """What an entry point names."""

    section: type[Section] | None
    open: Any


# --- An engine -------------------------------------------------------------------------------------------------------


class BiasedSection(EngineSection):
    kind: Literal["biased"] = "biased"
    favourite: str = "down"
    """Move with the weight 2; the others have the weight 1."""


class BiasedEngine:
    """Draws one move."""

    repeats = True

    def __init__(self, weights: list[float]) -> None:
        self.version = 0
        self._weights = weights

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        (move,) = random.Random(params.seed).choices(range(4), self._weights)
        return Completion(ints([move]), floats([0.0]), FinishReason.STOP, ((self.version, 1),))

    async def abort(self, session: str) -> None: ...
    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None: ...
    async def resume(self) -> None: ...

    async def health(self) -> EngineHealth:
        return EngineHealth(self.version, 0, 0, is_paused=False, fed_tokens=0)

    def forget(self, session: str) -> None: ...

    async def load(self, weights: Weights) -> None:
        self._weights = json.loads(await anyio.Path(weights.location).read_text())
        self.version = weights.version


@asynccontextmanager
async def open_biased(context: EngineContext) -> AsyncIterator[BiasedEngine]:
    assert isinstance(context.section, BiasedSection)
    favourite = context.section.favourite
    yield BiasedEngine([2.0 if name == favourite else 1.0 for name in NAMES])
    print("the engine is closed", flush=True)


class BareSection(Section):
    kind: Literal["bare"] = "bare"


BIASED = Kind(BiasedSection, open_biased)
BARE = Kind(BareSection, open_biased)

# --- A trainer -------------------------------------------------------------------------------------------------------


class CountingSection(TrainerSection):
    kind: Literal["counting"] = "counting"
    step_size: float = Field(default=1.0, gt=0)


class CountingTrainer:
    """Adds each sample's return to the weights of its moves."""

    def __init__(self, folder: Path, step_size: float) -> None:
        self._folder = folder
        self._step_size = step_size
        self._samples: list[Sample] = []
        self.version = 0
        self.weights = [1.0] * 4

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        self._samples += samples

    async def update(self) -> Mapping[str, float]:
        for sample in self._samples:
            for move in sample.token_ids[sample.mask]:
                self.weights[move] += self._step_size * float(sample.rewards.sum())
        count, self._samples = len(self._samples), []
        self.version += 1
        return {"counted": float(count)}

    async def score(self, samples: Sequence[Sample]) -> Sequence[Floats]:
        return [floats([0.0] * sample.num_policy_tokens) for sample in samples]

    async def publish(self) -> Weights:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"version-{self.version}.json"
        path.write_text(json.dumps(self.weights))
        return Weights(self.version, str(path))

    async def save(self, folder: str) -> None:
        (Path(folder) / "policy").mkdir(exist_ok=True)
        (Path(folder) / "counts.json").write_text(json.dumps([self.version, self.weights]))

    async def restore(self, folder: str) -> None:
        self.version, self.weights = json.loads((Path(folder) / "counts.json").read_text())


def open_counting(context: TrainerContext) -> CountingTrainer:
    assert isinstance(context.section, CountingSection)
    return CountingTrainer(context.folder, context.section.step_size)


COUNTING = Kind(CountingSection, open_counting)

# --- A renderer ------------------------------------------------------------------------------------------------------


class MovesSection(RendererSection):
    kind: Literal["moves"] = "moves"


class MovesRenderer:
    """Each move is a token. A prompt is the single token 4."""

    stop: tuple[int, ...] = ()

    def for_episode(self, start: Reset) -> Any:
        return self

    def open(self, observation: Observation) -> tuple[int, ...]:
        return (4,)

    def extend(self, history: Sequence[Exchange], observation: Observation) -> Prompt:
        return Prompt((4,))

    def action(self, token_ids: Sequence[int]) -> str:
        return NAMES[token_ids[0]]

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join((*NAMES, "?")[token] for token in token_ids)

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        return (NAMES.index(answer),)


def open_moves(context: RendererContext) -> MovesRenderer:
    return MovesRenderer()


MOVES = Kind(MovesSection, open_moves)

# --- A sandbox backend -----------------------------------------------------------------------------------------------


class WrappedSection(SandboxSection):
    kind: Literal["wrapped"] = "wrapped"
    label: str = "no label"


def open_wrapped(context: SandboxContext) -> ProcessBackend:
    assert isinstance(context.section, WrappedSection)
    context.announce(f"sandbox: wrapped with {context.section.label}")
    return ProcessBackend()


WRAPPED = Kind(WrappedSection, open_wrapped)


# --- An agent --------------------------------------------------------------------------------------------------------


async def wait(task: AgentTask) -> None:
    """Do nothing until the episode ends."""
    await anyio.sleep_forever()
