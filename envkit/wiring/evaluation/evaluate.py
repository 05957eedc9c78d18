"""Evaluation of a policy: `evaluate` plays many tasks and returns metrics with 95 % intervals."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from envkit import clock, installation
from envkit.errors import EnvkitError, UnreachableError, UsageError
from envkit.protocols import EnvHost, Player
from envkit.registry import EnvSpec
from envkit.runs.display import Display
from envkit.trainer_bridge.evaluation.advice import Limits, advice
from envkit.trainer_bridge.evaluation.outcomes import EpisodeOutcome, OutcomeTally, TokenUsage, measure, total_usage
from envkit.trainer_bridge.evaluation.statistics import Estimate, Stratum, strata
from envkit.types import JSON, EpisodeRecord, Options, Task
from envkit.wiring import tasks as task_sets
from envkit.wiring.contexts import PlayerContext, open_part
from envkit.wiring.environments import open_resources, slots
from envkit.wiring.evaluation.players import (
    OnEpisode,
    Playing,
    kind_of,
    own_player,
    play,
    player_for,
    spec_of,
    with_split,
)

if TYPE_CHECKING:
    from envkit.environments.swe.agents.mini_swe import Prompts
    from envkit.http.client.chat import Address
    from envkit.wiring.evaluation.local_models import LocalModel

SLOTS = 256
"""Maximum number of concurrent episodes in this process."""
TOOL_SLOTS = 8
"""Maximum number of concurrent episodes of an environment that uses sandboxes as tools."""
MAX_STRATA = 12
"""Maximum number of rows in a table or plot of success by difficulty."""
_DEFAULTS = Playing()
_EPISODES = 512


class _PlayAll(Protocol):
    async def __call__(
        self,
        host: EnvHost,
        tasks: Sequence[Task],
        *,
        attempts: int,
        on_episode: OnEpisode,
        skip: Container[tuple[int, int]],
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _EvaluatedPolicy:
    """A policy that was found, but whose model is not loaded yet.

    Attributes:
        opened: Function of the episodes' options. Returns a context manager that loads the policy and yields a function
            that plays episodes.
        options: Options of the environment that the policy was trained with.
        identity: Fingerprint of the policy's files; empty if unknown.
        limits: Limits of a language model; None for other players.
        warning: Warning for the user, in one line; may be empty.
    """

    opened: Callable[[Options], AbstractAsyncContextManager[_PlayAll]]
    options: Options
    identity: str = ""
    limits: Limits | None = None
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of `evaluate`.

    Attributes:
        attempts: Number of episodes per task.
        episodes: Number of finished episodes. Only these count in `metrics`, `levels` and `usage`.
        void: Number of episodes that could not finish, because the environment, its sandbox or an endpoint failed.
        void_by_agent: Number of void episodes whose sandbox ended because of a program in it (`Cause.by_agent`).
        metrics: ``"success"``, if the environment reports it. ``"pass@k"``, if there are several attempts: the
            probability that at least one of k attempts solves a task, over tasks with at least k finished attempts.
            ``"return"``, the sum of an episode's rewards. ``"turns"``. The environment's own metrics, aggregated over
            each episode. See `statistics.estimate` for the intervals.
        levels: One entry per task whose shortest solution is known: the number of moves of that solution, and whether
            each episode of the task succeeded. Empty if the environment does not report success.
        seconds: Duration in seconds; if the evaluation was interrupted and resumed, only since then.
        error: Why one of the void episodes was lost; None without void episodes.
        resumed: Number of episodes that were finished before the evaluation was interrupted and resumed.
        usage: Token counts of a language model, with those of the `resumed` episodes; zeros for other players.
        notes: Warnings of `advice`, one line each.
        versions: Versions of the environment's rules and data that its resets report as ``info["versions"]``.
        task_set: Hash of the tasks and `versions`. Results are comparable only if it is equal.
    """

    env_id: str
    policy: str
    seed: int
    options: Options
    attempts: int
    episodes: int
    void: int
    void_by_agent: int
    metrics: Mapping[str, Estimate]
    levels: Sequence[tuple[int, Sequence[bool]]]
    seconds: float
    error: str | None
    resumed: int
    usage: TokenUsage
    notes: Sequence[str]
    versions: Mapping[str, JSON]
    task_set: str

    def by_difficulty(self, *, most: int | None = None) -> list[Stratum]:
        """Return the success rate by length of the shortest solution; see `statistics.strata`."""
        return strata(self.levels, most=most)

    def as_json(self) -> dict[str, JSON]:
        """Return the result as JSON data, with each estimate as ``{"mean": m, "low": l, "high": h}``."""
        return {
            "env_id": self.env_id,
            "policy": self.policy,
            "seed": self.seed,
            "options": dict(self.options),
            "versions": dict(self.versions),
            "task_set": self.task_set,
            "attempts": self.attempts,
            "episodes": self.episodes,
            "void": self.void,
            "void_by_agent": self.void_by_agent,
            "metrics": {name: cast("JSON", one._asdict()) for name, one in self.metrics.items()},
            "by_difficulty": [
                {
                    "shortest": one.shortest,
                    "episodes": one.episodes,
                    "successes": one.successes,
                    "success": cast("JSON", one.success._asdict()),
                }
                for one in self.by_difficulty()
            ],
            "seconds": self.seconds,
            "error": self.error,
            "usage": cast("JSON", asdict(self.usage)),
            "notes": list(self.notes),
        }


async def evaluate(
    env_id: str,
    policy: str,
    *,
    episodes: int | None,
    seed: int,
    options: Options,
    split: str,
    display: Display,
    attempts: int = 1,
    url: str | None = None,
    token: str | None = None,
    ca: Path | None = None,
    backend: str | None = None,
    judge: str | None = None,
    greedy: bool = False,
    playing: Playing = _DEFAULTS,
    kept: Callable[[Mapping[str, JSON]], Iterable[EpisodeRecord]] | None = None,
    on_episode: OnEpisode | None = None,
) -> Evaluation:
    """Play `episodes` different tasks, each `attempts` times. The same arguments play the same episodes.

    A training run with the same ``env.options`` and ``evaluation.seed`` is evaluated on the same tasks as here with the
    split ``"eval"``. Attempts at a task differ only in what the policy samples. With a larger value of `attempts`,
    the earlier attempts stay the same.

    Args:
        env_id: Registered environment.
        policy: One of `players.POLICIES`, or a player of another package.
        episodes: Number of tasks; None means 512, or all if the split has fewer.
        seed: Seed of the tasks and of the policy's sampling.
        options: Options of every task.
        split: Split whose levels are played, if the environment has splits; ``"any"`` plays all levels.
        display: Shows the progress.
        attempts: Number of episodes per task.
        url: Address of an `envkit serve`; None plays in this process.
        token: Token for that server; None means the variable ``ENVKIT_TOKEN``.
        ca: PEM file of the certificates to trust for ``https://``, instead of the system's.
        backend: Kind of the sandboxes, for an environment that uses them as tools; None means ``"auto"``.
        judge: ``MODEL@URL`` of the judge, for an environment that needs one.
        greedy: Whether a language model picks the most likely token instead of sampling.
        playing: Settings of a language model.
        kept: Called before the first episode, with the values that identify this evaluation. Returns the episodes that
            it finished before it was interrupted; these are not played again. If `kept` is None, all are played.
        on_episode: Called with every episode when it ends, including void episodes, in no particular order. If a void
            episode is played again, it is reported again.

    Raises:
        UnknownEnvError: No such environment.
        OptionError: The environment rejects an option.
        UsageError: No such policy, or it cannot play this environment with these arguments.
        UnreachableError: The server does not answer, or stopped answering.
        EnvkitError: No episode finished, or an endpoint was lost.
    """
    if url is not None and (backend is not None or judge is not None):
        raise UsageError("--backend and --judge: the server at --url has its own; leave them out")
    spec = spec_of(env_id, url)
    kind, name = kind_of(policy, spec)
    playing.check(kind)
    if greedy and playing.temperature:
        raise UsageError("--greedy does not sample; leave out --greedy or --temperature")
    greedy = greedy or playing.temperature == 0
    if greedy and attempts > 1:
        raise UsageError(
            "greedy play (--greedy, or --temperature 0) makes all attempts at a task identical; sample, or use "
            "--attempts 1"
        )
    found = _find(kind, name, env_id, spec, replace(playing, temperature=0.0) if greedy else playing, seed)
    options = {**found.options, **options}
    wanted = _EPISODES if episodes is None else episodes
    tasks = evaluation_tasks(spec or EnvSpec(env_id, ""), options, split, seed, wanted)
    if spec is None or spec.task_set is None:
        options = tasks[0].options
    if episodes is not None and len(tasks) < episodes:
        display.announce(f"{env_id} has only {len(tasks)} tasks in the split {split}; each is played once per attempt")
    episodes = len(tasks)
    if found.warning:
        display.announce(found.warning)
    arguments: dict[str, JSON] = {
        "environment": env_id,
        "policy": policy,
        "weights": found.identity,
        "episodes": episodes,
        "attempts": attempts,
        "seed": seed,
        "split": split,
        "options": dict(options),
        "url": url,
        "greedy": greedy,
        **playing.arguments(),
    }
    earlier = () if kept is None else kept(arguments)
    tally = OutcomeTally(episodes, attempts, display, on_episode)
    async with (
        found.opened(options) as play_all,
        _host(spec, url, token, ca, episodes * attempts, options, backend, judge) as host,
    ):
        display.phase(policy, episodes * attempts)
        resumed = tally.restore(earlier)
        began = clock.now()
        try:
            await play_all(host, tasks, attempts=attempts, on_episode=tally.add, skip=tally.finished)
        except BaseException as error:
            display.close()
            if line := tally.so_far():
                display.announce(line)
            if isinstance(error, UnreachableError) and url is not None:
                reason = f"lost the server at {url}: {error}; repeat the evaluation once it is back"
                raise UnreachableError(reason) from error
            raise
        seconds = clock.now() - began
        display.close()
    outcomes = tally.by_task
    causes = [outcome.cause for task in outcomes for outcome in task if outcome.cause is not None]
    errors = [outcome.error for task in outcomes for outcome in task if outcome.error is not None]
    count = sum(map(len, outcomes)) - len(errors)
    if count == 0:
        raise EnvkitError(f"0 of {episodes * attempts} episodes of {env_id} finished; the first error: {errors[0]}")
    notes = [] if found.limits is None else advice(outcomes, found.limits)
    for line in notes:
        display.announce(line)
    return Evaluation(
        env_id=env_id,
        policy=policy,
        seed=seed,
        options=options,
        attempts=attempts,
        episodes=count,
        void=len(errors),
        void_by_agent=sum(cause.by_agent for cause in causes),
        metrics=measure(outcomes, attempts),
        levels=list(_levels(outcomes)),
        seconds=seconds,
        error=errors[0] if errors else None,
        resumed=resumed,
        usage=total_usage(outcomes),
        notes=notes,
        versions=tally.versions,
        task_set=task_set_hash(tasks, tally.versions),
    )


def task_set_hash(tasks: Iterable[Task], versions: Mapping[str, JSON]) -> str:
    """Return a hash of a set of tasks, played with these versions of the environment, as 16 hexadecimal digits."""
    content = json.dumps([sorted(task.key for task in tasks), dict(versions)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def evaluation_tasks(spec: EnvSpec, options: Options, split: str, seed: int, count: int) -> list[Task]:
    """Return `count` different tasks of a split, or all if it has fewer; see `envkit.wiring.tasks.task`.

    Raises:
        UsageError: The environment has no such split.
    """
    if spec.task_set is None:
        with_split(options, split, spec.splits)
    return list(task_sets.all_tasks(spec, options, split, seed, count))


def _levels(tasks: Sequence[Sequence[EpisodeOutcome]]) -> Iterator[tuple[int, Sequence[bool]]]:
    for task in tasks:
        solved = [one.is_solved for one in task if "success" in one.metrics]
        length = next((one.shortest for one in task if one.shortest is not None), None)
        if length is not None and solved:
            yield length, solved


def _find(kind: str, name: str, env_id: str, spec: EnvSpec | None, playing: Playing, seed: int) -> _EvaluatedPolicy:
    """Find a policy, and make those checks of it that do not need its model to be loaded."""
    if kind == "player":
        return _EvaluatedPolicy(partial(_open_own_player, name, spec, seed), {})
    if kind in ("random", "expert"):
        return _EvaluatedPolicy(partial(_open_player, kind, env_id, spec, seed), {})
    if kind == "openai":
        installation.load("httpx")
        from envkit.http.client.chat import Address
        from envkit.wiring.evaluation import endpoint

        address = Address.of(name)
        limits = Limits(playing.turn_tokens or endpoint.TURN_TOKENS, playing.max_turns or endpoint.MAX_TURNS, None)
        return _EvaluatedPolicy(partial(_open_endpoint, address, playing, limits, seed), {}, limits=limits)
    if kind == "mini_swe":
        installation.load("httpx")
        from envkit.http.client.chat import Address
        from envkit.wiring import mini_swe

        address, prompts = Address.of(name, prefix="mini_swe:"), mini_swe.installed_prompts()
        limits = Limits(playing.turn_tokens or mini_swe.TURN_TOKENS, playing.max_turns or prompts.max_steps, None)
        return _EvaluatedPolicy(
            partial(_open_mini_swe, address, playing, prompts, limits, seed),
            {},
            identity=mini_swe.identity_of(prompts),
            limits=limits,
            warning=mini_swe.announcement(prompts),
        )
    if kind not in ("model", "checkpoint"):
        return _EvaluatedPolicy(partial(_open_other, kind, name, env_id, seed), {})
    installation.load("torch")
    from envkit.wiring.evaluation.local_models import LocalModel

    if kind == "checkpoint":
        found = LocalModel.of_checkpoint(Path(name), playing, seed=seed)
    else:
        found = LocalModel.of_name(name, env_id, playing, seed=seed)
    return _EvaluatedPolicy(
        lambda _: _open_local(found),
        found.options_for(env_id),
        identity=found.identity,
        limits=found.limits,
        warning=found.mismatch(env_id),
    )


@asynccontextmanager
async def _open_player(
    kind: str, env_id: str, spec: EnvSpec | None, seed: int, options: Options
) -> AsyncIterator[_PlayAll]:
    yield partial(play, player_for(kind, env_id, spec, options), seed=seed)


@asynccontextmanager
async def _open_own_player(name: str, spec: EnvSpec | None, seed: int, options: Options) -> AsyncIterator[_PlayAll]:
    """Open a player of the environment."""
    yield partial(play, own_player(name, spec, options), seed=seed)


@asynccontextmanager
async def _open_other(kind: str, name: str, env_id: str, seed: int, options: Options) -> AsyncIterator[_PlayAll]:
    """Open a player of another package."""
    async with AsyncExitStack() as parts:
        context = PlayerContext(name=name, env_id=env_id, options=options)
        player: Player = await open_part(parts, "policies", kind, context)
        yield partial(play, player, seed=seed)


@asynccontextmanager
async def _open_endpoint(
    address: Address, playing: Playing, limits: Limits, seed: int, options: Options
) -> AsyncIterator[_PlayAll]:
    from envkit.http.client.chat import API_KEY, CONCURRENCY
    from envkit.wiring.evaluation import endpoint

    async with endpoint.open_endpoint(address, playing, api_key=os.environ.get(API_KEY)) as player:
        at_once = playing.concurrency or CONCURRENCY
        yield partial(play, player, seed=seed, at_once=at_once, max_turns=limits.max_turns)


@asynccontextmanager
async def _open_mini_swe(
    address: Address, playing: Playing, prompts: Prompts, limits: Limits, seed: int, options: Options
) -> AsyncIterator[_PlayAll]:
    from envkit.http.client.chat import API_KEY, CONCURRENCY
    from envkit.wiring import mini_swe

    async with mini_swe.open_mini_swe(address, playing, prompts, api_key=os.environ.get(API_KEY)) as player:
        at_once = playing.concurrency or CONCURRENCY
        yield partial(play, player, seed=seed, at_once=at_once, max_turns=limits.max_turns)


@asynccontextmanager
async def _open_local(found: LocalModel) -> AsyncIterator[_PlayAll]:
    async with found.opened() as player:
        yield player.play


@asynccontextmanager
async def _host(
    spec: EnvSpec | None,
    url: str | None,
    token: str | None,
    ca: Path | None,
    episodes: int,
    options: Options,
    backend: str | None,
    judge: str | None,
) -> AsyncIterator[EnvHost]:
    if url is None:
        needs = frozenset[str]() if spec is None else spec.needs
        count = max(1, min(TOOL_SLOTS if needs else SLOTS, episodes))
        async with (
            open_resources(needs, backend=backend, judge=judge) as resources,
            slots(count, options, resources) as host,
        ):
            yield host
    else:
        from envkit.http.client.env_client import EnvClient

        async with EnvClient(url, token=token, ca=ca) as client:
            yield client
