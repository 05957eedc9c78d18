"""Evaluation of a policy: `evaluate` plays many tasks and returns metrics with 95 % intervals."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from envkit import __version__, clock
from envkit.config import EvalConfig
from envkit.config.evaluation import TRAINING_KEYS
from envkit.errors import ConfigError, EnvkitError
from envkit.protocols import EnvHost
from envkit.registry import EnvSpec
from envkit.runs.display import Display
from envkit.runs.episodes import episode_of
from envkit.runs.printable import counted
from envkit.trainer_bridge.evaluation.advice import advice
from envkit.trainer_bridge.evaluation.outcomes import Tally
from envkit.trainer_bridge.evaluation.result import Evaluation
from envkit.trainer_bridge.scheduler import Rollout
from envkit.types import JSON, EpisodeRecord, Options, Task, Trajectory, stable_hash
from envkit.wiring import tasks as task_sets
from envkit.wiring.environments import open_resources, refuse_foreign, slots
from envkit.wiring.evaluation.contestant import FoundPolicy, num_envs
from envkit.wiring.evaluation.policies import find_policy, spec_of
from envkit.wiring.training.agents import views_of

if TYPE_CHECKING:
    from envkit.wiring.sandboxes.backends import BackendKind

TOOL_SLOTS = 8
"""Maximum number of concurrent episodes of an environment that uses sandboxes as tools."""

OnEpisode = Callable[[EpisodeRecord], None]


async def evaluate(
    config: EvalConfig,
    *,
    display: Display,
    kept: Callable[[Mapping[str, JSON]], Iterable[EpisodeRecord]] | None = None,
    on_episode: OnEpisode | None = None,
) -> Evaluation:
    """Play different tasks, each `attempts` times. The same configuration plays the same episodes.

    A training run with the same ``env.options`` and section ``evaluation`` is evaluated on the same tasks. Attempts at
    a task differ only in what the policy samples. With a larger value of `attempts`, the earlier ones stay the same.

    Args:
        config: The evaluation.
        display: Shows the progress.
        kept: Called before the first episode, with the values that identify this evaluation. Returns the episodes that
            it finished before it was interrupted; these are not played again. If `kept` is None, all are played.
        on_episode: Called with every episode when it ends, including void episodes, in no particular order. If a void
            episode is played again, it is reported again.

    Raises the errors of `envkit.evaluate`.
    """
    env, section = config.env, config.evaluation
    spec = spec_of(env.id, env.url)
    found = find_policy(config, spec)
    _check(config, found, spec)
    refuse_foreign(env.id, found.options, env.options, f"the policy {config.policy}")
    options: Options = {**found.options, **env.options}
    wanted, attempts = section.episodes, section.attempts
    played = spec or EnvSpec(env.id, "")
    tasks = list(task_sets.all_tasks(played, options, section.split, section.seed, wanted))
    if spec is None or spec.task_set is None:
        options = tasks[0].options
    notes = list(task_sets.notes(played, options))

    def note(line: str) -> None:
        notes.append(line)
        display.announce(line)

    if "episodes" in section.model_fields_set and len(tasks) < wanted:
        note(f"{env.id} has only {len(tasks)} tasks in the split {section.split}; each is played once per attempt")
    if "split" not in section.model_fields_set and task_sets.splits(played, options):
        every = task_sets.count(played, options, task_sets.ANY_SPLIT, wanted)
        if len(tasks) < every:
            note(f"{env.id}: {len(tasks)} of {every} tasks are in the split {section.split}; --split any plays all")
    if found.warning:
        note(found.warning)
    description = _description(config, found, options, tasks)
    if spec is None or spec.task_set is None:  # then the tasks follow from the arguments
        del description["tasks"]
    earlier = () if kept is None else kept(description)
    tally = Tally(len(tasks), attempts, display, on_episode)
    lost_in_a_row, total = 0, len(tasks) * attempts
    async with found.opened(options) as contestant, _host(config, spec, found, options, total) as (host, sandboxes):
        display.phase(config.policy, total)
        resumed = tally.restore(earlier)
        began = clock.now()

        def ended(trajectory: Trajectory) -> None:
            nonlocal lost_in_a_row
            tally.add(episode_of(trajectory, index=trajectory.index, decode=contestant.decode))
            lost_in_a_row = lost_in_a_row + 1 if trajectory.is_void else 0
            if lost_in_a_row >= max(found.at_once, 2):  # a server or endpoint is lost
                raise EnvkitError(
                    f"{lost_in_a_row} episodes in a row were void, the last one because: {trajectory.outcome.error}; "
                    "repeat the evaluation when this works again"
                )

        def seed_of(index: int, member: int) -> int:
            return stable_hash(section.seed, "policy", index, *([member] if member else []))

        rollout = Rollout(host, contestant.player, found.limits, found.at_once)
        try:
            await rollout.groups(
                tasks,
                attempts,
                phase="eval",
                seed=section.seed,
                temperature=found.temperature or 0.0,
                on_episode=ended,
                skip=tally.finished,
                seed_of=seed_of if found.temperature is None else None,
            )
        except BaseException:
            display.close()
            if line := tally.so_far():
                display.announce(line)
            raise
        seconds = clock.now() - began
        display.close()
    if found.temperature is not None:
        notes += advice(tally.by_task, found.limits)
    client = contestant.client
    if client is not None:
        notes += client.notes
        if client.retries:
            requests = counted(client.retries, "request")
            notes.append(f"repeated {requests} that had failed temporarily; the last failure: {client.retry_cause}")
    return Evaluation.of(
        tally,
        tasks,
        attempts=attempts,
        env_id=env.id,
        policy=config.policy,
        seed=section.seed,
        options=options,
        seconds=seconds,
        resumed=resumed,
        notes=notes,
        retries=0 if client is None else client.retries,
        settings={
            **description,
            "limits": _limits(found),
            "envkit": __version__,
            **sandboxes,
            **contestant.facts,
        },
    )


def _check(config: EvalConfig, found: FoundPolicy, spec: EnvSpec | None) -> None:
    """Refuse keys that contradict each other or have no effect."""
    problems = []
    for name, remedy in TRAINING_KEYS.items():
        section, _, key = name.partition(".")
        if key in getattr(config, section).model_fields_set:
            problems.append(f"{name}: is for training; {remedy}")
    if config.env.url is None and spec is not None:
        if "sandbox" in config.model_fields_set and "sandbox" not in spec.needs:
            problems.append(f"sandbox: {spec.id} does not use sandboxes as tools; leave it out (--backend)")
        if config.env.judge is not None and "judge" not in spec.needs:
            problems.append(f"env.judge: {spec.id} needs no judge; leave it out")
    if config.env.url is not None and ("sandbox" in config.model_fields_set or config.env.judge is not None):
        problems.append("sandbox and env.judge: the server at env.url has its own; leave them out")
    if config.evaluation.episodes == 0:
        problems.append("evaluation.episodes: must be at least 1")
    if found.temperature == 0 and config.evaluation.attempts > 1:
        problems.append(
            "evaluation.attempts: greedy play (rollout.temperature 0) makes all attempts at a task identical; sample, "
            "or use 1"
        )
    if problems:
        raise ConfigError(problems)


def _description(config: EvalConfig, found: FoundPolicy, options: Options, tasks: Sequence[Task]) -> dict[str, JSON]:
    """Return the values that must not change when an evaluation is resumed."""
    files = task_sets.content_of(options)
    agent: dict[str, JSON] = {} if found.agent is None else {"agent": found.agent.model_dump(mode="json")}
    return {
        "policy": config.policy,
        "weights": found.identity,
        **agent,
        "env": {"id": config.env.id, "url": config.env.url, "options": dict(options)},
        "evaluation": {**config.evaluation.model_dump(mode="json", exclude={"every"}), "episodes": len(tasks)},
        "rollout": {**config.set_keys("rollout"), "temperature": found.temperature},
        "renderer": config.set_keys("renderer"),
        "engine": {key: value for key, value in config.set_keys("engine").items() if key != "device"},
        "sandbox": config.set_keys("sandbox"),
        # The options of a task contain what its file says, such as the question and its answer, but not a folder.
        "tasks": f"those with the hash {stable_hash('tasks', *files, *(task.key for task in tasks)):x}",
    }


def _limits(found: FoundPolicy) -> dict[str, JSON]:
    """Return the limits of an episode; those that do not apply are None."""
    of_models = ("max_tokens", "turn_tokens", "completion_timeout_s")
    return {
        name: None if value in (sys.maxsize, math.inf) or (name in of_models and found.temperature is None) else value
        for name, value in asdict(found.limits).items()
    }


@asynccontextmanager
async def _host(
    config: EvalConfig, spec: EnvSpec | None, found: FoundPolicy, options: Options, episodes: int
) -> AsyncIterator[tuple[EnvHost, Mapping[str, JSON]]]:
    """Open the host, and return it with what the result says about its sandboxes."""
    env, sandboxes = config.env, dict[str, JSON]()
    if env.url is None:
        needs = frozenset[str]() if spec is None else spec.needs
        if "sandbox" in needs:
            from envkit.sandbox.docker.backend import default_image  # imported late: loads the backends
            from envkit.wiring.sandboxes.backends import choose_for_policy

            chosen = await choose_for_policy(cast("BackendKind", config.sandbox.kind))
            image = options.get("image") or await default_image() if chosen.name == "docker" else None
            sandboxes["sandbox"] = {"backend": chosen.name, "image": image, "lacking": list(chosen.lacking)}
        count = max(1, min(TOOL_SLOTS if needs and num_envs(config) is None else found.at_once, episodes))
        backend = config.sandbox.kind if "sandbox" in config.model_fields_set else None
        async with (
            open_resources(needs, backend=backend, judge=env.judge, views=views_of(found.agent)) as resources,
            slots(count, options, resources) as host,
        ):
            yield host, sandboxes
    else:
        from envkit.http.client.connect import read_token
        from envkit.http.client.env_client import EnvClient

        token = None if env.token_file is None else read_token(Path(env.token_file), print)
        async with EnvClient(env.url, token=token, ca=None if env.ca is None else Path(env.ca)) as client:
            yield client, sandboxes
