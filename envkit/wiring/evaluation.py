"""How well a policy plays: `evaluate` plays many tasks and sums them up, with 95 % intervals."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.errors import DeadlineError, EnvError, EnvkitError, SandboxLostError, UsageError, did_you_mean
from envkit.metrics import Fold, fold_infos
from envkit.protocols import EnvHost, Episode, Expert, Player
from envkit.registry import EnvSpec
from envkit.trainer_bridge.display import Display
from envkit.types import JSON, Info, Observation, Options, Task, Trajectory, stable_hash
from envkit.wiring.envs import find, open_expert, registered, slots

SLOTS = 256
"""Episodes at once in this process."""
MAX_SESSIONS = 256
"""Episodes at once on a server, if it has room for so many."""
MAX_TURNS = 10_000
"""Turns after which an episode is cut off, for worlds that have no limit of their own."""

ANY_SPLIT = "any"
"""Stands for the levels of all splits."""

_Z95 = 1.959964
_AMOUNTS = ("return", "turns")
_POLICIES = ("random", "expert", "checkpoint:DIR")

_PlayAll: TypeAlias = Callable[[EnvHost, Sequence[Task], int], Awaitable["list[Outcome]"]]


class Estimate(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        episodes: Episodes that were played to their end; everything below is about these.
        void: Episodes that were lost with their world or sandbox and say nothing about the policy.
        metrics: ``"success"``, ``"return"`` (sum of an episode's rewards), ``"turns"``, then whatever else the world
            measures, folded over each episode. No success where the world reports none.
        seconds: How long it took.
        error: Why the first void episode was lost, or None.
    """

    env_id: str
    policy: str
    seed: int
    options: Options
    episodes: int
    void: int
    metrics: Mapping[str, Estimate]
    seconds: float
    error: str | None

    def as_json(self) -> dict[str, JSON]:
        """Return it as plain data, each estimate as ``{"mean": m, "low": l, "high": h}``."""
        return {
            "env_id": self.env_id,
            "policy": self.policy,
            "seed": self.seed,
            "options": dict(self.options),
            "episodes": self.episodes,
            "void": self.void,
            "metrics": {name: cast("JSON", estimate._asdict()) for name, estimate in self.metrics.items()},
            "seconds": self.seconds,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """One episode.

    Attributes:
        metrics: What was measured; empty when the episode is void.
        error: One line when it is void.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RandomPlayer:
    """Plays any legal move, each equally likely; satisfies `envkit.protocols.Player`.

    Attributes:
        env_id: What is played, for messages.
        expert: Knows how a move is said in this world; None says it as it is.
    """

    env_id: str
    expert: Expert | None

    def act(self, observation: Observation, rng: random.Random) -> str:
        """Choose a move.

        Raises:
            UsageError: The world lists no legal moves.
        """
        if not observation.legal_moves:
            raise UsageError(f"{self.env_id} lists no legal moves, so there is nothing that this policy could play")
        move = observation.legal_moves[int(rng.random() * len(observation.legal_moves))]
        return move if self.expert is None else self.expert.answer(move)


@dataclass(frozen=True, slots=True)
class ExpertPlayer:
    """Plays what the world's expert knows best, and anything where it knows nothing."""

    expert: Expert
    otherwise: RandomPlayer

    def act(self, observation: Observation, rng: random.Random) -> str:
        moves = self.expert.moves(observation)
        return self.expert.answer(moves[0]) if moves else self.otherwise.act(observation, rng)


async def evaluate(
    env_id: str,
    policy: str,
    *,
    episodes: int,
    seed: int,
    options: Options,
    split: str,
    display: Display,
    url: str | None = None,
    greedy: bool = False,
) -> Evaluation:
    """Play `episodes` different tasks once each. The same arguments play the same episodes.

    Split and seed give the same tasks as the evaluation of a training file with the same ``env.options`` and
    ``evaluation.seed``.

    Args:
        env_id: Registered environment.
        policy: ``"random"``, ``"expert"`` or ``"checkpoint:DIR"`` with a folder that training saved.
        episodes: Number of tasks.
        seed: The tasks, and what a random policy plays, follow from this.
        options: Options of every task.
        split: Only levels of this split, where the world has any; ``"any"`` plays all levels.
        display: Shows the progress.
        url: Address of an `envkit serve`; None plays in this process.
        greedy: Whether a checkpoint takes the likeliest token instead of sampling.

    Raises:
        UnknownEnvError: No such environment.
        OptionError: The environment refuses an option.
        UsageError: There is no such policy, or it cannot play this environment.
        UnreachableError: The server does not answer.
        EnvkitError: Not one episode could be played.
    """
    spec = None if url is not None and all(one.id != env_id for one in registered()) else find(env_id)
    splits = () if spec is None else spec.splits
    async with _opened(policy, env_id, spec, greedy=greedy, display=display) as (defaults, play_all):
        tasks = list(evaluation_tasks(env_id, {**defaults, **options}, split, seed, episodes, splits))
        async with _host(url, episodes) as host:
            display.phase(policy, episodes)
            began = clock.now()
            outcomes = await play_all(host, tasks, seed)
            seconds = clock.now() - began
            display.close()
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    finished = [outcome.metrics for outcome in outcomes if outcome.error is None]
    if not finished:
        raise EnvkitError(f"not one of {episodes} episodes of {env_id} could be played: {errors[0]}")
    return Evaluation(
        env_id=env_id,
        policy=policy,
        seed=seed,
        options=tasks[0].options,
        episodes=len(finished),
        void=len(errors),
        metrics=summarise(finished),
        seconds=seconds,
        error=errors[0] if errors else None,
    )


def evaluation_tasks(
    env_id: str, options: Options, split: str, seed: int, count: int, splits: Sequence[str]
) -> Iterator[Task]:
    """Yield `count` tasks whose seeds follow from `seed` and `split`; the world has `splits`."""
    if splits and split not in (*splits, ANY_SPLIT):
        raise UsageError(f"--split: there is no {split!r}{did_you_mean(split, [*splits, ANY_SPLIT])}")
    chosen = {**options, "split": split} if split in splits else options
    for number in range(count):
        yield Task(env_id, stable_hash(seed, split, number) >> 33, chosen)


def summarise(episodes: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    """Return the mean of every metric over the episodes that have it, with its interval."""
    names = dict.fromkeys(["success", *_AMOUNTS])
    names.update(dict.fromkeys(name for metrics in episodes for name in metrics))
    found = {name: [metrics[name] for metrics in episodes if name in metrics] for name in names}
    return {name: estimate(values, is_share=name not in _AMOUNTS) for name, values in found.items() if values}


def estimate(values: Sequence[float], *, is_share: bool) -> Estimate:
    """Return the mean and its 95 % interval.

    For shares that are all 0 or 1 that is Wilson's interval, which is honest near the ends; otherwise the normal one,
    which has no width where all values are the same.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if is_share and all(value in (0, 1) for value in values):
        square = _Z95 * _Z95 / count
        middle = (mean + square / 2) / (1 + square)
        half = _Z95 * math.sqrt(mean * (1 - mean) / count + square / (4 * count)) / (1 + square)
        return Estimate(mean, max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)))
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, count - 1)
    half = _Z95 * math.sqrt(variance / count)
    return Estimate(mean, mean - half, mean + half)


@asynccontextmanager
async def _opened(
    policy: str, env_id: str, spec: EnvSpec | None, *, greedy: bool, display: Display
) -> AsyncIterator[tuple[Options, _PlayAll]]:
    """Give the options that a policy was made for, and what plays tasks with it."""
    kind, _, folder = policy.partition(":")
    if kind != "checkpoint" or not folder:
        yield {}, partial(play, _player(env_id, policy, spec), display=display)
        return
    from envkit.wiring.training import open_checkpoint_player

    async with open_checkpoint_player(Path(folder)) as player:

        async def play_all(host: EnvHost, tasks: Sequence[Task], seed: int) -> list[Outcome]:
            running = _Running(display)

            def count(trajectory: Trajectory) -> None:
                if not trajectory.stop.is_void:  # a void one is played again
                    running.add(_outcome(trajectory))

            return [_outcome(one) for one in await player.play(host, tasks, greedy=greedy, on_episode=count)]

        yield player.options_for(env_id), play_all


def _player(env_id: str, policy: str, spec: EnvSpec | None) -> Player:
    """Return who plays; `spec` is None for a world that only the server knows."""
    if policy not in ("random", "expert"):
        raise UsageError(f"--policy: there is no {policy!r}{did_you_mean(policy, _POLICIES)}")
    expert = None if spec is None or spec.expert is None else open_expert(env_id)
    if policy == "random":
        return RandomPlayer(env_id, expert)
    if expert is None:
        raise UsageError(f"--policy: {env_id} has no expert")
    return ExpertPlayer(expert, RandomPlayer(env_id, expert))


@asynccontextmanager
async def _host(url: str | None, episodes: int) -> AsyncIterator[EnvHost]:
    if url is None:
        async with slots(max(1, min(SLOTS, episodes))) as host:
            yield host
    else:
        from envkit.http.client import EnvClient

        async with EnvClient(url) as client:
            yield client


async def play(player: Player, host: EnvHost, tasks: Sequence[Task], seed: int, *, display: Display) -> list[Outcome]:
    """Play every task once, as many at a time as there is room for; outcomes in the order of the tasks."""
    outcomes: list[Outcome | None] = [None] * len(tasks)
    waiting = iter(enumerate(tasks))
    running = _Running(display)

    async def play_some() -> None:
        for number, task in waiting:
            rng = random.Random(stable_hash(seed, "policy", number))
            outcomes[number] = outcome = await _episode(player, host, task, rng)
            running.add(outcome)

    try:
        async with anyio.create_task_group() as group:
            for _ in range(min(host.capacity, MAX_SESSIONS, len(tasks))):
                group.start_soon(play_some)
    except ExceptionGroup as errors:
        raise _first(errors) from errors
    return [outcome for outcome in outcomes if outcome is not None]


def _first(errors: Exception) -> Exception:
    return _first(errors.exceptions[0]) if isinstance(errors, ExceptionGroup) else errors


async def _episode(player: Player, host: EnvHost, task: Task, rng: random.Random) -> Outcome:
    try:
        async with host.lease(task) as episode:
            return await _turns(player, episode, rng)
    except (EnvError, SandboxLostError, DeadlineError) as error:
        return Outcome(error=str(error))


async def _turns(player: Player, episode: Episode, rng: random.Random) -> Outcome:
    start = await episode.reset()
    folds = start.info.get("metrics")
    observation = start.observation
    infos: list[Info] = []
    rewards: list[float] = []
    while len(infos) < MAX_TURNS:
        await anyio.lowlevel.checkpoint()  # worlds that only compute never wait, and Ctrl-C has to come through
        step = await episode.step(player.act(observation, rng))
        infos.append(step.info)
        rewards.append(step.reward)
        if step.ended:
            break
        observation = step.observation
    measured = fold_infos(infos, cast("Mapping[str, Fold]", folds)) if isinstance(folds, dict) else {}
    return Outcome({**measured, "return": math.fsum(rewards), "turns": float(len(infos))})


def _outcome(trajectory: Trajectory) -> Outcome:
    if trajectory.stop.is_void:
        return Outcome(error=trajectory.error or trajectory.stop.value)
    totals = {"return": trajectory.reward, "turns": float(len(trajectory.turns))}
    return Outcome({**trajectory.metrics, **totals})


class _Running:
    """Shows the mean success so far."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._total = 0.0
        self._count = 0

    def add(self, outcome: Outcome) -> None:
        if "success" in outcome.metrics:
            self._total += outcome.metrics["success"]
            self._count += 1
        self._display.advance(1, success=self._total / self._count if self._count else math.nan)
