"""A scripted host, episode, engine, renderer and trainer that record their calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from envkit import clock
from envkit.protocols import EnvHost, Episode
from envkit.types import (
    Completion,
    EngineHealth,
    Exchange,
    FinishReason,
    Floats,
    Info,
    Observation,
    PauseMode,
    Prompt,
    Reset,
    Role,
    Sample,
    SamplingParams,
    Step,
    Task,
    ToolSchema,
    Weights,
    floats,
    ints,
    stable_hash,
)


@dataclass(frozen=True)
class Answer:
    """The observation of a reset or step and its delay, or the error that it raises."""

    text: str = "."
    reward: float = 0.0
    ends: str = ""  # or "terminated" or "truncated"
    after_s: float = 0.0
    error: Exception | None = None
    info: Info = field(default_factory=dict)
    legal_moves: tuple[str, ...] = ("u", "d", "l", "r")
    role: Role = "user"
    system: str | None = None
    tools: tuple[ToolSchema, ...] = ()
    limits_s: Sequence[float | None] = ()  # of the environment, for a step, the grader and the episode

    @property
    def observation(self) -> Observation:
        return Observation(self.text, self.legal_moves, role=self.role)


@dataclass
class ScriptedEpisode(Episode):
    """Returns its answers in order: the first for `reset`; the last one is repeated."""

    answers: Sequence[Answer]
    actions: list[str] = field(default_factory=list)

    async def reset(self) -> Reset:
        answer = await self._next()
        return Reset(answer.observation, answer.info, answer.system, answer.tools, False, *answer.limits_s)

    async def step(self, action: str) -> Step:
        self.actions.append(action)
        answer = await self._next()
        ends = (answer.ends == "terminated", answer.ends == "truncated")
        return Step(answer.observation, answer.reward, *ends, answer.info)

    async def _next(self) -> Answer:
        answer = self.answers[0]
        if len(self.answers) > 1:
            self.answers = self.answers[1:]
        await anyio.sleep(answer.after_s)
        if answer.error is not None:
            raise answer.error
        return answer


class ScriptedHost(EnvHost):
    """Leases episodes; the script depends on the task and on the number of its earlier leases.

    Its capacity is what it says; its places are what it has.
    """

    capacity: int = 100

    def __init__(self, script: Callable[[Task, int], Sequence[Answer]], capacity: int = 100, places: int = 100) -> None:
        self._script = script
        self._times: Counter[str] = Counter()
        self._places = anyio.Semaphore(places, fast_acquire=True)
        self.capacity = capacity
        self.lent = 0
        self.most_lent = 0
        self.episodes: list[ScriptedEpisode] = []

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[ScriptedEpisode]:
        async with self._places:
            self._times[task.key] += 1
            self.lent += 1
            self.most_lent = max(self.most_lent, self.lent)
            try:
                self.episodes.append(ScriptedEpisode(self._script(task, self._times[task.key] - 1)))
                yield self.episodes[-1]
            finally:
                self.lent -= 1


@dataclass(frozen=True)
class Call:
    """A request to an engine, and its time."""

    session: str | None
    prompt: tuple[int, ...]
    params: SamplingParams
    at_s: float


class ScriptedEngine:
    """Returns the completion of `say` for a call, by default one letter that depends on the seed."""

    def __init__(self, say: Callable[[Call], str] = lambda call: "abcdefgh"[call.params.seed % 8]) -> None:
        self._say = say
        self.repeats = True
        self.version = 0
        self.calls: list[Call] = []
        self.forgotten: list[str] = []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        call = Call(session, tuple(prompt_ids), params, clock.now())
        self.calls.append(call)
        await anyio.lowlevel.checkpoint()
        token_ids = letters(self._say(call))
        logprobs = floats([-0.5 * (place + 1) for place in range(len(token_ids))])
        return Completion(ints(token_ids), logprobs, FinishReason.LENGTH, ((self.version, len(token_ids)),))

    async def abort(self, session: str) -> None:
        pass

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def health(self) -> EngineHealth:
        return EngineHealth(self.version, 0, 0, is_paused=False, fed_tokens=0)

    def forget(self, session: str) -> None:
        self.forgotten.append(session)

    async def load(self, weights: Weights) -> None:
        self.version = weights.version


class ScriptedTrainer:
    """Its weights are a hash of all its samples."""

    def __init__(self) -> None:
        self.version = 0
        self.weights = 0
        self.taught: list[tuple[int, list[Sample]]] = []
        self.during_update: Callable[[], object] = lambda: None
        self._samples: list[Sample] = []

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        self._samples += samples

    async def update(self) -> Mapping[str, float]:
        self.during_update()
        self.weights = stable_hash(self.weights, [sample.token_ids.tolist() for sample in self._samples]) % 2**32
        self.version += 1
        self.taught.append((self.version, self._samples))
        self._samples = []
        return {"policy_loss": self.weights / 2**32, "entropy_nats": 1.5}

    async def publish(self) -> Weights:
        return Weights(self.version, "", self.weights)

    async def score(self, samples: Sequence[Sample]) -> list[Floats]:
        return [floats([-0.5] * sample.num_policy_tokens) for sample in samples]

    async def save(self, folder: str) -> None:
        (Path(folder) / "weights.json").write_text(json.dumps([self.version, self.weights]))

    async def restore(self, folder: str) -> None:
        self.version, self.weights = json.loads((Path(folder) / "weights.json").read_text())


class LetterRenderer:
    """Each letter is a token. Observations are in brackets."""

    stop = (ord("!"),)

    def for_episode(self, start: Reset) -> LetterRenderer:
        return self

    def open(self, observation: Observation) -> tuple[int, ...]:
        return letters(f"[{observation.text}]")

    def extend(self, history: Sequence[Exchange], observation: Observation) -> Prompt:
        return Prompt(self.open(observation))

    def action(self, token_ids: Sequence[int]) -> str:
        return text_of(token_ids)

    def text(self, token_ids: Sequence[int]) -> str:
        return text_of(token_ids)

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        return letters(answer)


def letters(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) for letter in text)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in token_ids)
