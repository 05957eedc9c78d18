"""Demonstrations of mixed quality, played by the world's own expert with a share of random moves. Free of torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import anyio.lowlevel

from envkit.errors import ConfigError
from envkit.protocols import EnvHost, Expert, Renderer
from envkit.types import Exchange, Observation, Prompt, Sample, Task

_FRUITLESS_EPISODES = 1000
"""Episodes in a row without a lesson after which there will never be one."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A single state and what can be done in it.

    Attributes:
        prompt: Tokens of the state, as the first turn of an episode.
        continuation: Tokens of the state, as a turn that follows another.
        good: Completions that play a best move.
        possible: Completions of all moves.
        is_tricky: Whether a careless player goes wrong here.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    good: tuple[tuple[int, ...], ...]
    possible: tuple[tuple[int, ...], ...]
    is_tricky: bool


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole episode of a teacher.

    Attributes:
        samples: Its tokens; the mask is 1 on the teacher's. One, and a further one from each turn on whose prompt does
            not continue the turn before. None where its first turn is too long.
        success: Whether the world called it one.
    """

    samples: tuple[Sample, ...]
    success: bool


@dataclass(frozen=True, slots=True)
class Teacher:
    """Plays with the expert's knowledge and a share of random moves.

    Attributes:
        expert: Knows the world.
        renderer: Turns states and moves into tokens.
        noise: Share of moves that are drawn from all legal ones, in [0, 1].
        is_bare: Whether a move is said as it is (``up``), and not as the expert writes it (``<answer>up</answer>``).
        turn_tokens: Tokens that the policy may say in a turn, apart from the one that stops it; None does not check.
    """

    expert: Expert
    renderer: Renderer
    noise: float
    is_bare: bool = False
    turn_tokens: int | None = None

    def say(self, move: str) -> str:
        """Return the text that plays `move`."""
        return move if self.is_bare else self.expert.answer(move)

    def tokens(self, move: str) -> tuple[int, ...]:
        """Return the tokens with which the policy would say `move`.

        Raises:
            ConfigError: They are more than it may say in a turn.
        """
        said = self.renderer.demonstrate(self.say(move))
        needed = sum(token not in self.renderer.stop for token in said)
        if self.turn_tokens is not None and needed > self.turn_tokens:
            reason = f"{self.turn_tokens} is too small: the demonstrated answer {self.say(move)} takes {needed} tokens"
            shorter = "" if self.is_bare else ", or set warmup.answers to bare"
            raise ConfigError([f"rollout.turn_tokens: {reason}; raise it{shorter}"])
        return said

    def move(self, observation: Observation, rng: random.Random) -> str:
        """Return the next move: random with chance `noise` (or where there is no way to success), else a best one.

        Raises:
            ConfigError: It would be a random one, and the environment does not list its moves.
        """
        good = self.expert.moves(observation)
        if not good or rng.random() < self.noise:
            if not observation.legal_moves:
                reason = "demonstrations hold random moves, and the environment lists no legal_moves in its info"
                raise ConfigError(
                    [f"warmup.kind: {reason}; add them, or set visit_random_share and episode_random_share to 0"]
                )
            return rng.choice(observation.legal_moves)
        return rng.choice(good)

    def lesson(self, observation: Observation) -> Lesson | None:
        """Return the lesson of this state; None where no move helps."""
        good = self.expert.moves(observation)
        if not good:
            return None
        said = tuple(self.tokens(move) for move in good)
        return Lesson(
            prompt=self.renderer.open(observation),
            continuation=self.renderer.extend([Exchange(observation, said[0])], observation).ids,
            good=said,
            possible=tuple(self.tokens(move) for move in observation.legal_moves),
            is_tricky=self.expert.is_tricky(observation),
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
    """Play noisy episodes and return the lesson of every state on the way, until there are `count`.

    Args:
        host: Where to play.
        teacher: Who plays and explains.
        tasks: What to play.
        count: Number of lessons.
        seed: Of the teacher's noise.
        on_lesson: Called after each lesson.

    Raises:
        ConfigError: The expert knows no move for `_FRUITLESS_EPISODES` episodes in a row.
    """
    found: list[Lesson] = []
    rng = random.Random(seed)
    fruitless = 0
    for task in tasks:
        before = len(found)
        await anyio.lowlevel.checkpoint()  # worlds that only compute never wait, and Ctrl-C has to come through
        async with host.lease(task) as episode:
            observation = (await episode.reset()).observation
            ended = False
            while not ended and len(found) < count:
                if (lesson := teacher.lesson(observation)) is not None:
                    found.append(lesson)
                    if on_lesson is not None:
                        on_lesson()
                step = await episode.step(teacher.say(teacher.move(observation, rng)))
                observation, ended = step.observation, step.ended
        if len(found) >= count:
            break
        fruitless = 0 if len(found) > before else fruitless + 1
        if fruitless == _FRUITLESS_EPISODES:
            reason = f"the expert of {task.env_id} knew no move in {fruitless:,} episodes in a row"
            raise ConfigError([f"warmup.kind: {reason}; take none and an engine.model"])
    return found


async def demonstrations(
    host: EnvHost, teacher: Teacher, tasks: Iterator[Task], count: int, seed: int, *, max_turns: int, max_tokens: int
) -> list[Demonstration]:
    """Play `count` whole episodes of at most `max_turns`, whose samples have at most `max_tokens`."""
    rng = random.Random(seed)
    return [await _demonstration(host, teacher, next(tasks), rng, max_turns, max_tokens) for _ in range(count)]


async def _demonstration(
    host: EnvHost, teacher: Teacher, task: Task, rng: random.Random, max_turns: int, max_tokens: int
) -> Demonstration:
    samples: list[Sample] = []
    ids: list[int] = []
    mask: list[int] = []
    turn_ids: list[int] = []
    history: list[Exchange] = []
    success = False
    await anyio.lowlevel.checkpoint()
    async with host.lease(task) as episode:
        observation = (await episode.reset()).observation
        prompt = Prompt(teacher.renderer.open(observation))
        for turn in range(max_turns):
            move = teacher.move(observation, rng)
            said = teacher.tokens(move)
            begun = 0 if prompt.starts_sample else len(ids)
            if begun + len(prompt.ids) + len(said) > max_tokens:
                break
            if prompt.starts_sample:
                samples.append(unscored_sample(ids, mask, turn_ids))
                ids, mask, turn_ids = [], [], []
            ids += prompt.ids + said
            mask += [0] * len(prompt.ids) + [1] * len(said)
            turn_ids += [turn] * (len(prompt.ids) + len(said))
            step = await episode.step(teacher.say(move))
            success = bool(step.info.get("success", False))
            if step.ended:
                break
            history.append(Exchange(observation, said))
            observation = step.observation
            prompt = teacher.renderer.extend(history, observation)
    return Demonstration((*samples, unscored_sample(ids, mask, turn_ids)) if ids else (), success)


def unscored_sample(ids: Sequence[int], mask: Sequence[int], turn_ids: Sequence[int]) -> Sample:
    """A sample to imitate: no policy drew it, so its log-probabilities and versions are zeros and it has no rewards."""
    return Sample("", tuple(ids), tuple(mask), (0.0,) * len(ids), tuple(turn_ids), (), (0,) * len(ids), 0)
