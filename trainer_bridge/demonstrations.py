"""Demonstrations of mixed quality, played by the world's own expert with a share of random moves. Free of torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from envkit.protocols import EnvHost, Expert, Renderer
from envkit.types import Observation, Sample, Task, stable_hash


@dataclass(frozen=True, slots=True)
class Lesson:
    """A single state and what can be done in it.

    Attributes:
        prompt: Tokens of the state, as the first turn of an episode.
        good: Completions that play a best move.
        possible: Completions of all moves.
        is_tricky: Whether a careless player goes wrong here.
    """

    prompt: tuple[int, ...]
    good: tuple[tuple[int, ...], ...]
    possible: tuple[tuple[int, ...], ...]
    is_tricky: bool


@dataclass(frozen=True, slots=True)
class Teacher:
    """Plays with the expert's knowledge and a share of random moves.

    Attributes:
        expert: Knows the world.
        renderer: Turns states and moves into tokens.
        noise: Share of moves that are drawn from all legal ones, in [0, 1].
    """

    expert: Expert
    renderer: Renderer
    noise: float

    def move(self, observation: Observation, rng: random.Random) -> str:
        """Return the next move: random with chance `noise` (or where there is no way to success), else a best one."""
        good = self.expert.moves(observation)
        if not good or rng.random() < self.noise:
            return rng.choice(observation.legal_moves)
        return rng.choice(good)

    def lesson(self, observation: Observation) -> Lesson | None:
        """Return the lesson of this state; None where no move helps."""
        good = self.expert.moves(observation)
        if not good:
            return None
        say = self.renderer.demonstrate
        return Lesson(
            prompt=self.renderer.open(observation),
            good=tuple(say(self.expert.answer(move)) for move in good),
            possible=tuple(say(self.expert.answer(move)) for move in observation.legal_moves),
            is_tricky=self.expert.is_tricky(observation),
        )


def training_tasks(task: Task, seed: int) -> Iterator[Task]:
    """Yield tasks like `task` for ever, with seeds that follow from `seed`."""
    number = 0
    while True:
        yield Task(task.env_id, stable_hash(seed, number) >> 33, task.options)
        number += 1


async def lessons(host: EnvHost, teacher: Teacher, tasks: Iterable[Task], count: int, seed: int) -> list[Lesson]:
    """Play noisy episodes and return the lesson of every state on the way, until there are `count`."""
    found: list[Lesson] = []
    rng = random.Random(seed)
    for task in tasks:
        async with host.lease(task) as episode:
            observation = (await episode.reset()).observation
            ended = False
            while not ended and len(found) < count:
                if (lesson := teacher.lesson(observation)) is not None:
                    found.append(lesson)
                step = await episode.step(teacher.expert.answer(teacher.move(observation, rng)))
                observation, ended = step.observation, step.ended
        if len(found) >= count:
            break
    return found


async def demonstrations(
    host: EnvHost, teacher: Teacher, tasks: Iterator[Task], count: int, seed: int, max_turns: int
) -> list[Sample]:
    """Play `count` whole episodes and return each as a sample whose mask is 1 on the teacher's tokens."""
    rng = random.Random(seed)
    found: list[Sample] = []
    for _ in range(count):
        task = next(tasks)
        async with host.lease(task) as episode:
            observation = (await episode.reset()).observation
            ids: list[int] = []
            mask: list[int] = []
            turn_ids: list[int] = []
            prompt = teacher.renderer.open(observation)
            for turn in range(max_turns):
                answer = teacher.expert.answer(teacher.move(observation, rng))
                said = teacher.renderer.demonstrate(answer)
                ids += prompt + said
                mask += [0] * len(prompt) + [1] * len(said)
                turn_ids += [turn] * (len(prompt) + len(said))
                step = await episode.step(answer)
                if step.ended:
                    break
                observation = step.observation
                prompt = teacher.renderer.extend(said, observation)
        zeros = (0,) * len(ids)
        found.append(Sample(task.key, tuple(ids), tuple(mask), (0.0,) * len(ids), tuple(turn_ids), (), zeros))
    return found
