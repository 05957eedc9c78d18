"""How well a policy plays: `evaluate` plays many tasks and sums them up, with 95 % intervals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from envkit import clock
from envkit.errors import EnvkitError, UnreachableError, UsageError
from envkit.protocols import EnvHost
from envkit.registry import EnvSpec
from envkit.trainer_bridge.run_folder.display import Display
from envkit.trainer_bridge.run_folder.episodes import episode_of
from envkit.types import JSON, EpisodeRecord, Options, Task, Trajectory, stable_hash
from envkit.wiring.environments import slots
from envkit.wiring.evaluation.difficulty import NotingHost
from envkit.wiring.evaluation.players import Outcome, Progress, outcome_of, play, player_for, spec_of, with_split
from envkit.wiring.evaluation.statistics import Estimate, Stratum, estimate, strata, summarise

if TYPE_CHECKING:
    from envkit.wiring.training.run import CheckpointPlayer

SLOTS = 256
"""Episodes at once in this process."""
MAX_STRATA = 12
"""Lengths of shortest solutions, or ranges of them, that a person wants to see."""


OnEpisode: TypeAlias = Callable[[EpisodeRecord], None]


class _PlayAll(Protocol):
    def __call__(
        self, host: EnvHost, tasks: Sequence[Task], *, attempts: int, display: Display, on_episode: OnEpisode | None
    ) -> Awaitable[list[list[Outcome]]]: ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        attempts: How often each task was played.
        episodes: Episodes that were played to their end; everything below is about these.
        void: Episodes that were lost with their world or sandbox and say nothing about the policy.
        void_by_agent: Those whose sandbox was ended by what ran in it, see `envkit.types.Cause.by_agent`.
        metrics: ``"success"``, with several attempts ``"pass@N"`` (share of the tasks that were solved at least once in
            N attempts, over tasks none of whose attempts was lost), ``"return"`` (sum of an episode's rewards),
            ``"turns"``, then whatever else the world measures, folded over each episode. No success where the world
            reports none. See `estimates.estimate` for the intervals.
        levels: For each task whose world tells how hard it is: the moves of its shortest solution, and whether each of
            its episodes succeeded. Empty where the world tells no success.
        seconds: How long it took.
        error: Why the first void episode was lost, or None.
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

    def by_difficulty(self, *, most: int | None = None) -> list[Stratum]:
        """Return success by the length of the shortest solution; see `estimates.strata`."""
        return strata(self.levels, most=most)

    def as_json(self) -> dict[str, JSON]:
        """Return it as plain data, each estimate as ``{"mean": m, "low": l, "high": h}``."""
        return {
            "env_id": self.env_id,
            "policy": self.policy,
            "seed": self.seed,
            "options": dict(self.options),
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
        }


async def evaluate(
    env_id: str,
    policy: str,
    *,
    episodes: int,
    seed: int,
    options: Options,
    split: str,
    display: Display,
    attempts: int = 1,
    url: str | None = None,
    greedy: bool = False,
    on_episode: OnEpisode | None = None,
) -> Evaluation:
    """Play `episodes` different tasks, each `attempts` times. The same arguments play the same episodes.

    Split and seed give the same tasks as the evaluation of a training file with the same ``env.options`` and
    ``evaluation.seed``. The first attempts are the same however many follow; later ones differ from them in what the
    policy draws, not in the task.

    Args:
        env_id: Registered environment.
        policy: ``"random"``, ``"expert"`` or ``"checkpoint:DIR"`` with a folder that training saved.
        episodes: Number of tasks.
        seed: The tasks, and what a random policy plays, follow from this.
        options: Options of every task.
        split: Only levels of this split, where the world has any; ``"any"`` plays all levels.
        display: Shows the progress.
        attempts: Episodes of each task.
        url: Address of an `envkit serve`; None plays in this process.
        greedy: Whether a checkpoint takes the likeliest token instead of sampling.
        on_episode: Called with every episode, void ones included, in no particular order.

    Raises:
        UnknownEnvError: No such environment.
        OptionError: The environment refuses an option.
        UsageError: There is no such policy, or it cannot play this environment or so often.
        UnreachableError: The server does not answer, or no longer.
        EnvkitError: Not one episode could be played.
    """
    if greedy and attempts > 1:
        raise UsageError("--greedy plays every attempt at a task alike; leave it out, or take --attempts 1")
    spec = spec_of(env_id, url)

    def draw(usual: Options) -> list[Task]:
        splits = () if spec is None else spec.splits
        return list(evaluation_tasks(env_id, {**usual, **options}, split, seed, episodes, splits))

    async with (
        _opened(policy, env_id, spec, draw, display, seed=seed, greedy=greedy) as (tasks, play_all),
        _host(url, episodes * attempts, tasks[0].options) as lender,
    ):
        host = NotingHost(lender)
        display.phase(policy, episodes * attempts)
        began = clock.now()
        try:
            outcomes = await play_all(host, tasks, attempts=attempts, display=display, on_episode=on_episode)
        except UnreachableError as error:
            raise UnreachableError(f"the server at {url} was lost: {error}; evaluate again once it is back") from error
        seconds = clock.now() - began
        display.close()
    causes = [outcome.cause for task in outcomes for outcome in task if outcome.cause is not None]
    errors = [outcome.error for task in outcomes for outcome in task if outcome.error is not None]
    finished = [[outcome.metrics for outcome in task if outcome.error is None] for task in outcomes]
    if not any(finished):
        raise EnvkitError(f"not one of {episodes * attempts} episodes of {env_id} could be played: {errors[0]}")
    return Evaluation(
        env_id=env_id,
        policy=policy,
        seed=seed,
        options=tasks[0].options,
        attempts=attempts,
        episodes=sum(map(len, finished)),
        void=len(errors),
        void_by_agent=sum(cause.by_agent for cause in causes),
        metrics=_metrics(finished, attempts),
        levels=list(_levels(finished, [host.shortest(task) for task in tasks])),
        seconds=seconds,
        error=errors[0] if errors else None,
    )


def evaluation_tasks(
    env_id: str, options: Options, split: str, seed: int, count: int, splits: Sequence[str]
) -> Iterator[Task]:
    """Yield `count` tasks whose seeds follow from `seed` and `split`; the world has `splits`."""
    chosen = with_split(options, split, splits)
    for number in range(count):
        yield Task(env_id, stable_hash(seed, split, number) >> 33, chosen)


def _metrics(tasks: Sequence[Sequence[Mapping[str, float]]], attempts: int) -> dict[str, Estimate]:
    found = summarise(tasks)
    if attempts == 1 or "success" not in found:
        return found
    solved = [[_is_solved(metrics) for metrics in task] for task in tasks if len(task) == attempts]
    passed = estimate([[float(any(task))] for task in solved], is_share=True) if solved else None
    first = {"success": found.pop("success")} | ({} if passed is None else {f"pass@{attempts}": passed})
    return {**first, **found}


def _levels(
    tasks: Sequence[Sequence[Mapping[str, float]]], lengths: Sequence[int | None]
) -> Iterator[tuple[int, Sequence[bool]]]:
    for task, length in zip(tasks, lengths, strict=True):
        solved = [_is_solved(metrics) for metrics in task if "success" in metrics]
        if length is not None and solved:
            yield length, solved


def _is_solved(metrics: Mapping[str, float]) -> bool:
    return metrics.get("success") == 1


@asynccontextmanager
async def _opened(
    policy: str,
    env_id: str,
    spec: EnvSpec | None,
    draw: Callable[[Options], list[Task]],
    display: Display,
    *,
    seed: int,
    greedy: bool,
) -> AsyncIterator[tuple[list[Task], _PlayAll]]:
    """Give the tasks, drawn with the options that the policy was made for, and what plays them with it."""
    kind, _, folder = policy.partition(":")
    if kind == "checkpoint" and folder:
        from envkit.wiring.training.run import open_checkpoint_player

        async with open_checkpoint_player(Path(folder)) as trained:
            if line := trained.mismatch(env_id):
                display.say(line)
            yield draw(trained.options_for(env_id)), partial(_play_checkpoint, trained, greedy=greedy)
    else:
        tasks = draw({})
        yield tasks, partial(play, player_for(policy, env_id, spec, tasks[0].options), seed=seed)


async def _play_checkpoint(
    player: CheckpointPlayer,
    host: EnvHost,
    tasks: Sequence[Task],
    *,
    greedy: bool,
    attempts: int,
    display: Display,
    on_episode: OnEpisode | None,
) -> list[list[Outcome]]:
    """Play every task as `players.play` does; an episode of another seed for each attempt, as members in training."""
    progress = Progress(display)

    def count(trajectory: Trajectory) -> None:
        if not trajectory.stop.is_void:  # a void one is played again
            progress.add(outcome_of(trajectory))

    played = await player.play(host, tasks, greedy=greedy, attempts=attempts, on_episode=count)
    if on_episode is not None:
        for place, trajectory in enumerate(played):
            on_episode(episode_of(trajectory, index=place // attempts, decode=player.decode))
    if line := player.cut_off(played):
        display.say(line)
    return [[outcome_of(one) for one in played[start : start + attempts]] for start in range(0, len(played), attempts)]


@asynccontextmanager
async def _host(url: str | None, episodes: int, options: Options) -> AsyncIterator[EnvHost]:
    if url is None:
        async with slots(max(1, min(SLOTS, episodes)), options) as host:
            yield host
    else:
        from envkit.http.client.env_client import EnvClient

        async with EnvClient(url) as client:
            yield client
