"""Players that choose one action at a time, and `play`, which runs episodes with them in parallel."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import anyio
import anyio.lowlevel

from envkit.config import kinds
from envkit.errors import (
    CapacityError,
    DeadlineError,
    EnvError,
    SandboxLostError,
    SandboxStartError,
    UsageError,
    did_you_mean,
    leaves,
)
from envkit.metrics import Fold, fold_infos, with_grade
from envkit.protocols import EnvHost, Episode, EpisodePlayer, Expert, GradedEpisode, Player, TaskExpert
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
from envkit.wiring.environments import find, open_expert, open_helper, registered

MAX_SESSIONS = 256
"""Maximum number of concurrent episodes on a server; the server's capacity may be lower."""
MAX_TURNS = 10_000
"""Default number of turns after which an episode is cut off, because an environment may set no limit itself."""

ANY_SPLIT = "any"
"""Selects the levels of all splits."""

_GRADE_S = 600.0
"""Maximum seconds of a grader; after that, the episode is void."""

NOP = "nop"
"""The player that plays an empty action in each turn, unless the environment has a player of this name."""

POLICIES = ("random", "expert", "model:NAME-OR-PATH", "openai:MODEL@URL", "mini_swe:MODEL@URL", "checkpoint:DIR")
"""The built-in policies."""

OnEpisode = Callable[[EpisodeRecord], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Playing:
    """Settings for a language model that plays. None means the default for its kind of policy.

    Attributes:
        system: System prompt.
        turn_tokens: Maximum tokens of one answer.
        max_turns: Turns after which an episode is cut off.
        max_tokens: Maximum tokens of a prompt plus its answer. If the next prompt is too long, the episode is cut off.
        temperature: Sampling temperature; 0 is greedy.
        history: Number of most recent turns in a prompt, or ``"all"``.
        thinking: Whether thoughts of earlier turns stay in the prompt (``"keep"``) or are cut (``"cut"``).
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``, for a model in this process.
        batch: Number of concurrent episodes of a model in this process.
        concurrency: Number of concurrent requests to an endpoint.
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

    def arguments(self) -> dict[str, JSON]:
        """Return those settings that must not change when an evaluation is resumed, without any that are None."""
        names = ("system", "turn_tokens", "max_turns", "max_tokens", "temperature", "history", "thinking")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check(self, kind: str) -> None:
        """Check that all settings that are not None apply to policies of `kind`, such as ``"openai"``.

        Raises:
            UsageError: A setting does not apply to policies of this kind.
        """
        for name, allowing in _KINDS.items():
            if getattr(self, name) is not None and kind not in allowing:
                option, allowed = name.replace("_", "-"), " or ".join(f"{one}:..." for one in allowing)
                raise UsageError(f"--{option} needs --policy {allowed}; leave it out with {kind}")


_KINDS = {
    **dict.fromkeys(("turn_tokens", "max_turns", "temperature"), ("model", "checkpoint", "openai", "mini_swe")),
    **dict.fromkeys(("system", "history", "thinking"), ("model", "checkpoint", "openai")),
    "concurrency": ("openai", "mini_swe"),
    **dict.fromkeys(("max_tokens", "device", "batch"), ("model", "checkpoint")),
}
"""For each setting of `Playing`, the kinds of policies that it applies to."""


class NoCompletionError(Exception):
    """A model's endpoint returned no completion, so the episode is void."""


class PromptTooLongError(Exception):
    """The next prompt does not fit into the model's context, so the episode is cut off, and graded as it is."""


@dataclass(frozen=True, slots=True)
class RandomPlayer:
    """A player that chooses each legal move with equal probability; see `envkit.protocols.Player`.

    Attributes:
        env_id: Id of the environment, for error messages.
        expert: Formats each move as an answer; if None, the action is the name of the move.
    """

    env_id: str
    expert: Expert | None

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        return _Chooser(partial(self.choose, rng=rng))

    def choose(self, observation: Observation, rng: random.Random) -> str:
        """Choose a move.

        Raises:
            UsageError: The environment lists no legal moves.
        """
        if not observation.legal_moves:
            raise UsageError(
                f"{self.env_id} lists no legal moves for a random policy; use --policy expert if it has an expert, or "
                "a language model (--policy model:NAME-OR-PATH), or add legal_moves to its info"
            )
        move = observation.legal_moves[int(rng.random() * len(observation.legal_moves))]
        return move if self.expert is None else self.expert.answer(move)


@dataclass(frozen=True, slots=True)
class ExpertPlayer:
    """A player that chooses the expert's best move, or a random move if the expert finds none."""

    expert: Expert
    otherwise: RandomPlayer

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        expert = self.expert.for_task(task) if isinstance(self.expert, TaskExpert) else self.expert

        def choose(observation: Observation) -> str:
            moves = expert.moves(observation)
            return expert.answer(moves[0]) if moves else self.otherwise.choose(observation, rng)

        return _Chooser(choose)


class NopPlayer:
    """A player that does nothing."""

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        return _Chooser(lambda observation: "")


@dataclass(frozen=True, slots=True)
class _Chooser:
    """One episode of a player that chooses each action from the latest observation alone."""

    choose: Callable[[Observation], str]

    @property
    def generation(self) -> None:
        return None

    async def act(self, observation: Observation) -> str:
        return self.choose(observation)


def spec_of(env_id: str, url: str | None) -> EnvSpec | None:
    """Return the registered spec of `env_id`; None for an environment that only the server at `url` knows.

    Raises:
        UnknownEnvError: There is no such environment, and `url` is None.
    """
    return None if url is not None and all(one.id != env_id for one in registered()) else find(env_id)


def with_split(options: Options, split: str, splits: Sequence[str]) -> Options:
    """Return `options` plus the option ``split``, unless `split` is ``"any"`` or the environment has no `splits`.

    Raises:
        UsageError: The environment has no such split.
    """
    if splits and split not in (*splits, ANY_SPLIT):
        raise UsageError(f"--split: there is no {split!r}{did_you_mean(split, [*splits, ANY_SPLIT])}")
    return {**options, "split": split} if split in splits else options


def kind_of(policy: str, spec: EnvSpec | None = None) -> tuple[str, str]:
    """Return the kind and name of a policy, such as ``("model", "smollm2-135m")``; the name of others may be empty.

    The kind of a player of the environment, such as ``oracle`` or ``cheat:skip``, is ``"player"``.

    Raises:
        UsageError: There is no such kind, or the name is missing.
    """
    if policy == NOP or (spec is not None and policy in spec.players):
        return "player", policy
    kind, _, name = policy.partition(":")
    forms = {one.partition(":")[0]: one for one in POLICIES}
    form = forms.get(kind)
    others = kinds.names("policies") if form is None else []
    if kind in others:
        return kind, name
    if form is None or (name and ":" not in form):
        known = [*(f"{one}:" if ":" in forms[one] else one for one in forms), *others]
        of_env = [NOP, *(one for one in (() if spec is None else spec.players) if one != NOP)]
        remedy = ""
        if form is None:
            remedy = did_you_mean(policy, of_env, lists=False) or did_you_mean(kind, known, lists=False)
        all_forms = f"; there are: {', '.join([*POLICIES, *of_env, *others])}"
        raise UsageError(f"--policy: there is no {policy!r}{remedy or all_forms}")
    if ":" in form and not name:
        raise UsageError(f"--policy: {policy} lacks {form.partition(':')[2]} after the colon; write {form}")
    return kind, name


def own_player(name: str, spec: EnvSpec | None, options: Options) -> Player:
    """Return the player `name` of an environment, such as ``oracle``, for episodes with `options`.

    Raises:
        OptionError: The player rejects an option.
    """
    if spec is None or name not in spec.players:
        return NopPlayer()
    player: Player = open_helper(spec, spec.players[name], options)
    return player


def player_for(policy: str, env_id: str, spec: EnvSpec | None, options: Options) -> Player:
    """Return the player for `policy`, which is ``"random"`` or ``"expert"``, and for episodes with `options`.

    `spec` is None for an environment that only a server knows; such an environment has no expert here.

    Raises:
        UsageError: The environment has no expert.
        OptionError: The expert rejects an option.
    """
    expert = None if spec is None or spec.expert is None else open_expert(env_id, options)
    if policy == "random":
        return RandomPlayer(env_id, expert)
    if expert is None:
        raise UsageError(f"--policy: {env_id} has no expert; use another policy")
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
    """Play every task `attempts` times, with as many parallel episodes as the host's capacity allows.

    With a larger value of `attempts`, the earlier attempts stay the same.

    Args:
        player: Chooses the actions.
        host: Runs the environments.
        tasks: Tasks to play.
        seed: Seed from which, with the task's index and the attempt's number, the seed of an episode's player follows.
        attempts: Number of episodes per task.
        on_episode: Called with each episode when it ends, including void episodes.
        skip: Episodes to skip, each as (index in `tasks`, number of the attempt from 0).
        at_once: Maximum number of parallel episodes.
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
            on_episode(await play_episode(player, host, task, rng, index=number, member=attempt, max_turns=max_turns))

    try:
        async with anyio.create_task_group() as group:
            for _ in range(min(host.capacity, at_once, len(tasks) * attempts)):
                group.start_soon(play_some)
    except ExceptionGroup as errors:
        raise next(leaves(errors)) from errors


async def play_episode(
    player: Player, host: EnvHost, task: Task, rng: random.Random, *, index: int, member: int, max_turns: int
) -> EpisodeRecord:
    """Play one episode: attempt number `member` at task number `index`."""
    start: Reset | None = None
    turns: list[TurnRecord] = []
    infos: list[Info] = []
    rewards: list[float] = []
    stop, error, cause, grade = StopReason.MAX_TURNS, None, None, None
    try:
        async with host.lease(task) as episode:
            start = await episode.reset()
            observation = start.observation
            playing = player.begin(task, start, rng)
            while len(turns) < max_turns:
                # Yield to the event loop so that Ctrl-C works: an environment that only computes never yields.
                await anyio.lowlevel.checkpoint()
                try:
                    action = await playing.act(observation)
                except PromptTooLongError:
                    stop = StopReason.CONTEXT_OVERFLOW
                    break
                step = await episode.step(action)
                turns.append(TurnRecord.of(action, step, playing.generation))
                infos.append(step.info)
                rewards.append(step.reward)
                if step.ended:
                    stop = StopReason.TERMINATED if step.terminated else StopReason.TRUNCATED
                    break
                observation = step.observation
            grade = await grade_of(episode, start)
    except NoGradeError as failure:
        stop, error = StopReason.NO_GRADE, str(failure)
    except NoCompletionError as failure:
        stop, error = StopReason.NO_COMPLETION, str(failure)
    except EnvError as failure:
        stop, error = StopReason.ENV_ERROR, str(failure)
    except (SandboxStartError, SandboxLostError, CapacityError) as failure:
        cause = failure.cause if isinstance(failure, SandboxLostError) else None
        stop, error = StopReason.SANDBOX_LOST, str(failure)
    except DeadlineError as failure:
        stop, error = StopReason.TIMEOUT, str(failure)
    folds = None if start is None else start.info.get("metrics")
    metrics = fold_infos(infos, cast("Mapping[str, Fold]", folds)) if isinstance(folds, dict) else {}
    if grade is not None:
        rewards.append(grade)
        metrics = with_grade(metrics, grade)
    return EpisodeRecord.of(
        *(task, start, turns, stop),
        index=index,
        member=member,
        reward=math.fsum(rewards),
        metrics=metrics,
        error=error,
        cause=cause,
        grade=grade,
    )


class NoGradeError(Exception):
    """The grader could not run, so the episode is void."""


async def grade_of(episode: Episode, start: Reset) -> float | None:
    """Grade an episode after its last turn. Return None if the reset `start` announced no grader.

    Raises:
        NoGradeError: The grader could not run, or did not answer within 600 s.
    """
    if not start.is_graded:
        return None
    if not isinstance(episode, GradedEpisode):
        raise NoGradeError("the reset announced a grader, but the host passes none on")
    with anyio.move_on_after(_GRADE_S) as scope:
        grade = await episode.grade()
    if scope.cancelled_caught:
        raise NoGradeError(f"the grader did not answer within {_GRADE_S:g} s")
    if grade is None or not math.isfinite(grade):
        raise NoGradeError("the grader could not run" if grade is None else f"the grader returned {grade}")
    return grade
