"""Players that `play` asks for one action at a time, and how many episodes are played at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import anyio
import anyio.lowlevel

from envkit.errors import DeadlineError, EnvError, SandboxLostError, UsageError, did_you_mean
from envkit.metrics import Fold, fold_infos
from envkit.protocols import EnvHost, EpisodePlayer, Expert, Player
from envkit.registry import EnvSpec
from envkit.types import (
    JSON,
    EpisodeRecord,
    Info,
    Observation,
    Options,
    Reset,
    StopReason,
    Task,
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

POLICIES = ("random", "expert", "model:NAME-OR-PATH", "openai:MODEL@URL", "checkpoint:DIR")

OnEpisode = Callable[[EpisodeRecord], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Playing:
    """How a language model plays. None takes the default of the policy.

    Attributes:
        system: System prompt.
        turn_tokens: Bound on the tokens of one answer.
        max_turns: Turns after which an episode is cut off.
        max_tokens: Bound on a prompt and its answer; an episode whose next prompt does not fit is cut off.
        temperature: Sampling temperature; 0 is greedy.
        history: Turns that a prompt holds.
        thinking: Whether thoughts of earlier turns stay in the prompt.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        batch: Episodes at once of a model in this process.
        concurrency: Requests at once to an endpoint.
    """

    system: str | None = None
    turn_tokens: int | None = None
    max_turns: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    history: int | Literal["all"] | None = None
    thinking: Literal["keep", "cut"] | None = None
    device: Literal["auto", "cpu", "cuda"] | None = None
    batch: int | None = None
    concurrency: int | None = None

    def asked(self) -> dict[str, JSON]:
        """Return what is set and must be the same where an evaluation goes on."""
        names = ("system", "turn_tokens", "max_turns", "max_tokens", "temperature", "history", "thinking")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check(self, kind: str) -> None:
        """Find out whether a policy of this kind has all options that are set.

        Raises:
            UsageError: It has not.
        """
        for name, kinds in _KINDS.items():
            if getattr(self, name) is not None and kind not in kinds:
                option, allowed = name.replace("_", "-"), " or ".join(f"{one}:..." for one in kinds)
                raise UsageError(f"--{option} goes with --policy {allowed}, not with {kind}; leave it out")


_KINDS = {
    **dict.fromkeys(
        ("turn_tokens", "max_turns", "temperature", "system", "history", "thinking"), ("model", "checkpoint", "openai")
    ),
    "concurrency": ("openai",),
    **dict.fromkeys(("max_tokens", "device", "batch"), ("model", "checkpoint")),
}
"""Which policies have which options."""


class NoCompletionError(Exception):
    """A model's endpoint gave no completion, so that the episode is void."""


class PromptTooLongError(Exception):
    """The next prompt does not fit into what a model can read, so that the episode is cut off."""


@dataclass(frozen=True, slots=True)
class RandomPlayer:
    """Plays any legal move, each equally likely; satisfies `envkit.protocols.Player`.

    Attributes:
        env_id: What is played, for messages.
        expert: Knows how a move is said in this world; None says it as it is.
    """

    env_id: str
    expert: Expert | None

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        return _Chooser(partial(self.choose, rng=rng))

    def choose(self, observation: Observation, rng: random.Random) -> str:
        """Choose a move.

        Raises:
            UsageError: The world lists no legal moves.
        """
        if not observation.legal_moves:
            raise UsageError(
                f"{self.env_id} lists no legal moves that a random policy could choose from; take --policy expert, "
                "if it has one, or a language model (--policy model:NAME-OR-PATH), or put legal_moves into its info"
            )
        move = observation.legal_moves[int(rng.random() * len(observation.legal_moves))]
        return move if self.expert is None else self.expert.answer(move)


@dataclass(frozen=True, slots=True)
class ExpertPlayer:
    """Plays what the world's expert knows best, and anything where it knows nothing."""

    expert: Expert
    otherwise: RandomPlayer

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        return _Chooser(partial(self.choose, rng=rng))

    def choose(self, observation: Observation, rng: random.Random) -> str:
        moves = self.expert.moves(observation)
        return self.expert.answer(moves[0]) if moves else self.otherwise.choose(observation, rng)


@dataclass(frozen=True, slots=True)
class _Chooser:
    """An episode of a player that computes each action from the observation alone."""

    choose: Callable[[Observation], str]

    @property
    def generation(self) -> None:
        return None

    async def act(self, observation: Observation) -> str:
        return self.choose(observation)


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


def kind_of(policy: str) -> tuple[str, str]:
    """Return the kind of a policy and what it names, such as ``("model", "smollm2-135m")``.

    Raises:
        UsageError: There is no such kind, or the name is missing.
    """
    kind, _, name = policy.partition(":")
    forms = {one.partition(":")[0]: one for one in POLICIES}
    form = forms.get(kind)
    if form is None or (name and ":" not in form):
        remedy = did_you_mean(kind, forms, lists=False) if form is None else ""
        there_are = f"; there are: {', '.join(POLICIES)}"
        raise UsageError(f"--policy: there is no {policy!r}{remedy or there_are}")
    if ":" in form and not name:
        raise UsageError(f"--policy: {policy} names no {form.partition(':')[2]}; write {form}")
    return kind, name


def player_for(policy: str, env_id: str, spec: EnvSpec | None, options: Options) -> Player:
    """Return who plays episodes with `options`: ``"random"`` or ``"expert"``.

    `spec` is None for a world that only the server knows.

    Raises:
        UsageError: The world has no expert.
        OptionError: The expert refuses an option.
    """
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
    on_episode: OnEpisode,
    skip: Container[tuple[int, int]] = (),
    at_once: int = MAX_SESSIONS,
    max_turns: int = MAX_TURNS,
) -> None:
    """Play every task `attempts` times, as many episodes at a time as there is room for.

    The first attempts are the same however many follow.

    Args:
        player: Who plays.
        host: Where the episodes are.
        tasks: What is played.
        seed: The player's chances follow from this, the place in `tasks` and the attempt.
        attempts: Episodes of each task.
        on_episode: Called with each episode as it ends, void ones included.
        skip: Episodes that are not played, as (place in `tasks`, attempt).
        at_once: Bound on the episodes at a time.
        max_turns: Turns after which an episode is cut off.
    """
    waiting = (
        (number, task, attempt)
        for number, task in enumerate(tasks)
        for attempt in range(attempts)
        if (number, attempt) not in skip
    )

    async def play_some() -> None:
        for number, task, attempt in waiting:
            rng = random.Random(stable_hash(seed, "policy", number, *([attempt] if attempt else [])))
            on_episode(await _episode(player, host, task, rng, index=number, member=attempt, max_turns=max_turns))

    try:
        async with anyio.create_task_group() as group:
            for _ in range(min(host.capacity, at_once, len(tasks) * attempts)):
                group.start_soon(play_some)
    except ExceptionGroup as errors:
        raise next(_leaves(errors)) from errors


async def _episode(
    player: Player, host: EnvHost, task: Task, rng: random.Random, *, index: int, member: int, max_turns: int
) -> EpisodeRecord:
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
            playing = player.begin(task, start, rng)
            while len(turns) < max_turns:
                await anyio.lowlevel.checkpoint()  # worlds that only compute never wait, and Ctrl-C has to come through
                action = await playing.act(observation)
                step = await episode.step(action)
                turns.append(TurnRecord.of(action, step, playing.generation))
                infos.append(step.info)
                rewards.append(step.reward)
                if step.ended:
                    stop = StopReason.TERMINATED if step.terminated else StopReason.TRUNCATED
                    break
                observation = step.observation
    except PromptTooLongError:
        stop = StopReason.MAX_TOKENS
    except NoCompletionError as failure:
        stop, error = StopReason.NO_COMPLETION, str(failure)
    except EnvError as failure:
        stop, error = StopReason.ENV_ERROR, str(failure)
    except SandboxLostError as failure:
        stop, error, cause = StopReason.SANDBOX_LOST, str(failure), failure.cause
    except DeadlineError as failure:
        stop, error = StopReason.TIMEOUT, str(failure)
    folds = None if start is None else start.info.get("metrics")
    metrics = fold_infos(infos, cast("Mapping[str, Fold]", folds)) if isinstance(folds, dict) else {}
    total = math.fsum(rewards)
    return EpisodeRecord.of(
        task, start, turns, stop, index=index, member=member, reward=total, metrics=metrics, error=error, cause=cause
    )


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
