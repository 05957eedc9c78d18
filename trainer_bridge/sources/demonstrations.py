"""Demonstrations of mixed quality: the environment's expert plays, but some moves are drawn at random.

This module does not import torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import anyio.lowlevel

from envkit.errors import ConfigError, EnvkitError, PlayerStoppedError
from envkit.protocols import EnvHost, EpisodePlayer, Expert, Player, Renderer, expert_for
from envkit.types import (
    Action,
    Completion,
    Exchange,
    FinishReason,
    Observation,
    Prompt,
    Reset,
    RolloutRequest,
    Sample,
    StopReason,
    Task,
    Trajectory,
    bools,
    floats,
    ints,
)

from ..rollout import RolloutLimits
from ..samples import samples_from
from ..scheduler import Rollout

_FRUITLESS_EPISODES = 1000
"""Number of consecutive episodes without a lesson after which `lessons` raises an error."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A single state with its best moves and its possible moves, for imitation.

    Attributes:
        prompt: Tokens of the turn's prompt if the state is the first turn of a sample.
        continuation: Tokens of the turn's prompt if the state is a later turn.
        good: The expert's best moves, each as the tokens of a completion.
        possible: All legal moves, each as the tokens of a completion.
        is_hazardous: Whether a careless move in this state loses the episode.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    good: tuple[tuple[int, ...], ...]
    possible: tuple[tuple[int, ...], ...]
    is_hazardous: bool


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole episode that a teacher played.

    Attributes:
        samples: Samples of the episode; the mask is 1 on the teacher's tokens. A turn whose prompt does not continue
            the previous turn starts a new sample. There are no samples if the first turn exceeds the token limit.
        success: Whether the episode was a success; None if that is unknown.
    """

    samples: tuple[Sample, ...]
    success: bool | None


@dataclass(frozen=True, slots=True)
class Teacher:
    """Plays the expert's moves, but replaces some of them by random moves.

    Attributes:
        noise: Probability in [0, 1] of a move drawn at random from all legal moves.
        is_bare: Whether answers are bare moves (``up``) instead of the expert's format (``<answer>up</answer>``).
        turn_tokens: Maximum number of tokens of a completion, without the stop token; None means no limit.
    """

    expert: Expert
    renderer: Renderer
    noise: float
    is_bare: bool = False
    turn_tokens: int | None = None

    def for_episode(self, task: Task, start: Reset) -> Teacher:
        """Return the teacher of an episode of `task`, with the system prompt and tools of the reset `start`."""
        return replace(self, expert=expert_for(self.expert, task), renderer=self.renderer.for_episode(start))

    def answer(self, move: str) -> str:
        """Return the answer text for `move`."""
        return move if self.is_bare else self.expert.answer(move)

    def tokens(self, move: str) -> tuple[int, ...]:
        """Return the tokens of a completion that plays `move`.

        Raises:
            ConfigError: The completion exceeds `turn_tokens`.
        """
        completion = self.renderer.demonstrate(self.answer(move))
        needed = sum(token not in self.renderer.stop for token in completion)
        if self.turn_tokens is not None and needed > self.turn_tokens:
            reason = (
                f"{self.turn_tokens} is too small: the demonstrated answer {self.answer(move)} takes {needed} tokens"
            )
            shorter = "" if self.is_bare else ", or set imitation.answers to bare"
            raise ConfigError([f"rollout.turn_tokens: {reason}; raise it{shorter}"])
        return completion

    def move(self, observation: Observation, rng: random.Random) -> str:
        """Return a best move of the expert. With probability `noise`, or if no move is good, return a random one.

        Raises:
            ConfigError: A random move is required, but the environment does not list its legal moves.
        """
        good = self.expert.moves(observation)
        if not good or rng.random() < self.noise:
            if not observation.legal_moves:
                reason = "demonstrations need random moves, but the environment lists no legal_moves in its info"
                raise ConfigError([f"imitation.kind: {reason}; add them, or set imitation.random_share to 0"])
            return rng.choice(observation.legal_moves)
        return rng.choice(good)

    def lesson(self, observation: Observation) -> Lesson | None:
        """Return the lesson for the observed state, or None if the expert knows no good move."""
        good = self.expert.moves(observation)
        if not good:
            return None
        completions = tuple(self.tokens(move) for move in good)
        return Lesson(
            prompt=self.renderer.open(observation),
            continuation=self.renderer.extend([Exchange(observation, completions[0])], observation).ids,
            good=completions,
            possible=tuple(self.tokens(move) for move in observation.legal_moves),
            is_hazardous=self.expert.is_hazardous(observation),
        )


async def lessons(
    host: EnvHost,
    teacher: Teacher,
    tasks: Iterable[Task],
    count: int,
    seed: int,
    *,
    on_lesson: Callable[[], None] | None = None,
) -> list[Lesson]:
    """Let `teacher` play episodes, and return a lesson for each state in which the expert knows a good move.

    There are at most `count` lessons; `on_lesson` is called after each. The teacher's random moves depend on `seed`.

    Raises:
        ConfigError: The expert knew no move in any state of `_FRUITLESS_EPISODES` consecutive episodes.
    """
    found: list[Lesson] = []
    rng = random.Random(seed)
    fruitless = 0
    for task in tasks:
        before = len(found)
        # Yield to the event loop so that Ctrl-C works: an environment in this process never yields.
        await anyio.lowlevel.checkpoint()
        async with host.lease(task) as episode:
            start = await episode.reset()
            observation, ended, playing = start.observation, False, teacher.for_episode(task, start)
            while not ended and len(found) < count:
                if (lesson := playing.lesson(observation)) is not None:
                    found.append(lesson)
                    if on_lesson is not None:
                        on_lesson()
                step = await episode.step(playing.answer(playing.move(observation, rng)))
                observation, ended = step.observation, step.ended
        if len(found) >= count:
            break
        fruitless = 0 if len(found) > before else fruitless + 1
        if fruitless == _FRUITLESS_EPISODES:
            reason = f"the expert of {task.env_id} knew no move in {fruitless:,} episodes in a row"
            raise ConfigError([f"imitation.kind: {reason}; set it to none, and use a pretrained engine.model"])
    return found


async def demonstrations(
    host: EnvHost, teacher: Teacher, tasks: Iterator[Task], count: int, seed: int, limits: RolloutLimits
) -> list[Demonstration]:
    """Let `teacher` play `count` whole episodes within `limits`, one after another.

    Raises:
        EnvkitError: An episode is void after all retries.
    """
    rollout = Rollout(host, _TeacherPlayer(teacher, limits.max_tokens, random.Random(seed)), limits, 1)
    result = await rollout.groups(list(islice(tasks, count)), phase="demonstrations", seed=seed)
    return [_demonstration(one) for one in result.trajectories]


def _demonstration(played: Trajectory) -> Demonstration:
    if played.is_void:
        raise EnvkitError(f"a demonstration of {played.task.env_id} is void: {played.outcome.error}")
    samples = samples_from(played) if played.turns else ()
    return Demonstration(tuple(samples), played.outcome.success)


@dataclass(frozen=True, slots=True)
class _TeacherPlayer(Player):
    """Plays the moves of a teacher; `rng` is shared by all episodes."""

    teacher: Teacher
    max_tokens: int
    rng: random.Random

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return _TeacherEpisode(self.teacher.for_episode(request.task, start), self.max_tokens, self.rng)


@dataclass(slots=True)
class _TeacherEpisode(EpisodePlayer):
    """An episode of a teacher. `length` is the number of tokens of the current sample."""

    teacher: Teacher
    max_tokens: int
    rng: random.Random
    length: int = 0
    history: list[Exchange] = field(default_factory=list)

    async def act(self, observation: Observation) -> Action:
        renderer, history = self.teacher.renderer, self.history
        prompt = renderer.extend(history, observation) if history else Prompt(renderer.open(observation))
        move = self.teacher.move(observation, self.rng)
        ids = self.teacher.tokens(move)
        self.length = (0 if prompt.starts_sample else self.length) + len(prompt.ids) + len(ids)
        if self.length > self.max_tokens:
            raise PlayerStoppedError(StopReason.CONTEXT_OVERFLOW)
        history.append(Exchange(observation, ids))
        completion = Completion(ints(ids), floats([0.0] * len(ids)), FinishReason.STOP, ((0, len(ids)),))
        return Action(self.teacher.answer(move), prompt.ids, completion, prompt.starts_sample)


def unscored_sample(ids: Sequence[int], mask: Sequence[int], turn_ids: Sequence[int]) -> Sample:
    """Return a sample to imitate, without rewards. No policy sampled it, so log-probabilities and versions are 0."""
    zeros = [0] * len(ids)
    return Sample("", ints(ids), bools(mask), floats(zeros), ints(turn_ids), floats(()), ints(zeros), "")
