"""Who plays where no training is: at random or as the world's expert, and how many episodes are played at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import anyio
import anyio.lowlevel

from envkit.errors import DeadlineError, EnvError, SandboxLostError, UsageError, did_you_mean
from envkit.metrics import Fold, fold_infos
from envkit.protocols import EnvHost, Expert, Player
from envkit.registry import EnvSpec
from envkit.trainer_bridge.run_folder.display import Display
from envkit.types import (
    Cause,
    EpisodeRecord,
    Info,
    Observation,
    Options,
    Reset,
    StopReason,
    Task,
    Trajectory,
    TurnRecord,
    stable_hash,
)
from envkit.wiring.environments import find, open_expert, registered

MAX_SESSIONS = 256
"""Episodes at once on a server, if it has room for so many."""
MAX_TURNS = 10_000
"""Turns after which an episode is cut off, for worlds that have no limit of their own."""

ANY_SPLIT = "any"
"""Stands for the levels of all splits."""

_POLICIES = ("random", "expert", "checkpoint:DIR")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One episode.

    Attributes:
        metrics: What was measured; empty when the episode is void.
        error: One line when it is void.
        cause: Why its sandbox was lost, if it was and that is known.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    cause: Cause | None = None


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
            raise UsageError(
                f"{self.env_id} lists no legal moves that a random policy could choose from; take --policy expert, "
                "if it has one, or --policy checkpoint:DIR after training, or put legal_moves into its info"
            )
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


class Progress:
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


def spec_of(env_id: str, url: str | None) -> EnvSpec | None:
    """Return what is registered under `env_id`; None for a world that only the server at `url` knows.

    Raises:
        UnknownEnvError: There is no such environment, and no server that could have it.
    """
    return None if url is not None and all(one.id != env_id for one in registered()) else find(env_id)


def with_split(options: Options, split: str, splits: Sequence[str]) -> Options:
    """Return the options that draw levels of `split` only, in a world that has `splits`; any, where it has none.

    Raises:
        UsageError: The world has no such split.
    """
    if splits and split not in (*splits, ANY_SPLIT):
        raise UsageError(f"--split: there is no {split!r}{did_you_mean(split, [*splits, ANY_SPLIT])}")
    return {**options, "split": split} if split in splits else options


def player_for(policy: str, env_id: str, spec: EnvSpec | None, options: Options) -> Player:
    """Return who plays episodes with `options`; `spec` is None for a world that only the server knows.

    Raises:
        UsageError: There is no such policy, or the world has no expert.
        OptionError: The expert refuses an option.
    """
    if policy not in ("random", "expert"):
        raise UsageError(f"--policy: there is no {policy!r}{did_you_mean(policy, _POLICIES)}")
    expert = None if spec is None or spec.expert is None else open_expert(env_id, options)
    if policy == "random":
        return RandomPlayer(env_id, expert)
    if expert is None:
        raise UsageError(f"--policy: {env_id} has no expert")
    return ExpertPlayer(expert, RandomPlayer(env_id, expert))


async def play(
    player: Player,
    host: EnvHost,
    tasks: Sequence[Task],
    *,
    seed: int,
    attempts: int,
    display: Display,
    on_episode: Callable[[EpisodeRecord], None] | None = None,
) -> list[list[Outcome]]:
    """Play every task `attempts` times, as many episodes at a time as there is room for.

    Returns:
        For each task, in order, what became of its attempts. The first attempts are the same however many follow.
    """
    outcomes: list[list[Outcome | None]] = [[None] * attempts for _ in tasks]
    waiting = ((number, task, attempt) for number, task in enumerate(tasks) for attempt in range(attempts))
    progress = Progress(display)

    async def play_some() -> None:
        for number, task, attempt in waiting:
            rng = random.Random(stable_hash(seed, "policy", number, *([attempt] if attempt else [])))
            outcome, episode = await _episode(player, host, task, rng, index=number, member=attempt)
            outcomes[number][attempt] = outcome
            if on_episode is not None:
                on_episode(episode)
            progress.add(outcome)

    try:
        async with anyio.create_task_group() as group:
            for _ in range(min(host.capacity, MAX_SESSIONS, len(tasks) * attempts)):
                group.start_soon(play_some)
    except ExceptionGroup as errors:
        raise next(_leaves(errors)) from errors
    return [[outcome for outcome in some if outcome is not None] for some in outcomes]


def outcome_of(trajectory: Trajectory) -> Outcome:
    """Return what a policy's episode comes to."""
    if trajectory.stop.is_void:
        return Outcome(error=trajectory.error or trajectory.stop.value, cause=trajectory.cause)
    totals = {"return": trajectory.reward, "turns": float(len(trajectory.turns))}
    return Outcome({**trajectory.metrics, **totals})


async def _episode(
    player: Player, host: EnvHost, task: Task, rng: random.Random, *, index: int, member: int
) -> tuple[Outcome, EpisodeRecord]:
    """Play one episode; `index` and `member` are the numbers of the task and of the attempt at it."""
    start: Reset | None = None
    turns: list[TurnRecord] = []
    infos: list[Info] = []
    rewards: list[float] = []
    stop, error, cause = StopReason.MAX_TURNS, None, None
    try:
        async with host.lease(task) as episode:
            start = await episode.reset()
            observation = start.observation
            while len(turns) < MAX_TURNS:
                await anyio.lowlevel.checkpoint()  # worlds that only compute never wait, and Ctrl-C has to come through
                action = player.act(observation, rng)
                step = await episode.step(action)
                turns.append(TurnRecord.of(action, step))
                infos.append(step.info)
                rewards.append(step.reward)
                if step.ended:
                    stop = StopReason.TERMINATED if step.terminated else StopReason.TRUNCATED
                    break
                observation = step.observation
    except EnvError as failure:
        stop, error = StopReason.ENV_ERROR, str(failure)
    except SandboxLostError as failure:
        stop, error, cause = StopReason.SANDBOX_LOST, str(failure), failure.cause
    except DeadlineError as failure:
        stop, error = StopReason.TIMEOUT, str(failure)
    folds = None if start is None else start.info.get("metrics")
    metrics = fold_infos(infos, cast("Mapping[str, Fold]", folds)) if isinstance(folds, dict) else {}
    total = math.fsum(rewards)
    record = EpisodeRecord.of(
        task, start, turns, stop, index=index, member=member, reward=total, metrics=metrics, error=error, cause=cause
    )
    if error is not None:
        return Outcome(error=error, cause=cause), record
    return Outcome({**metrics, "return": total, "turns": float(len(turns))}), record


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
