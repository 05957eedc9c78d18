"""Opens the source that a phase of imitation learns from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path

from envkit import clock
from envkit.config import RunConfig
from envkit.errors import ConfigError, UsageError
from envkit.protocols import EnvHost, Renderer
from envkit.registry import EnvSpec
from envkit.runs.display import Display
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.sources import demonstrations
from envkit.trainer_bridge.sources.demonstrations import Demonstration, Lesson, Teacher
from envkit.trainer_bridge.sources.dialogues import read_dialogues
from envkit.trainer_bridge.sources.lessons import LessonBook
from envkit.trainer_bridge.sources.source import Source
from envkit.types import Sample, Task, stable_hash
from envkit.wiring import environments
from envkit.wiring import tasks as task_sets
from envkit.wiring.training.resolve import filled, limits_of, parts_of, policy_kind

_PART = 64
"""Number of episodes to prepare between two updates of the display."""
_HAZARD_SHARE = 0.5
"""Share of single states that are hazardous, so that a careless move loses."""
_EPISODE_RANDOM_SHARE = 0.65
"""Share of random moves in the demonstrated episodes of a tiny policy."""
_STATES_PER_EPISODE = 4
"""An episode counts as this many samples of an update."""
_SHARES = {"tiny": (5 / 12, 1 / 2), "pretrained": (10 / 13, 0.0)}
"""Shares of the updates on single states, and on several states in a row, if prompts have the whole history. The other
updates are on whole episodes."""


async def open_source(
    run: RunConfig, specs: Sequence[EnvSpec], renderer: Renderer, host: EnvHost, display: Display
) -> Source:
    """Read the dialogues, or let the experts play the demonstrations, of a resolved training file.

    A policy learns to read from single states, and then, if its prompts have the whole history, to answer only the
    newest of several states, and from whole episodes.

    `host` plays the demonstrations in this process: no output of a policy is executed.
    """
    if run.imitation.kind == "dialogues":
        return await _dialogues(run, renderer, display)
    return await _Demonstrations(run, specs, renderer, host, display).source()


async def _dialogues(run: RunConfig, renderer: Renderer, display: Display) -> Source:
    section, limit = run.imitation, run.rollout.max_tokens
    if not isinstance(renderer, ChatRenderer):
        raise UsageError("imitation.kind: dialogues need a model with a chat template; name one in engine.model")
    display.phase("read dialogues", 1)
    read = await clock.to_thread(partial(read_dialogues, Path(filled(section.file)), renderer, max_tokens=limit))
    if read.skipped:
        total = len(read.samples) + read.skipped
        display.announce(
            f"skipped {read.skipped} of {total} dialogues, which are longer than rollout.max_tokens ({limit})"
        )
    size = filled(section.batch)
    batch = read.batches(size, stable_hash(run.seed, "dialogues"))
    updates = section.updates or -(-len(read.samples) // size)
    return Source(updates, batch, facts={"dialogues": len(read.samples), "dialogues_skipped": read.skipped})


class _Demonstrations:
    """Lets the experts of all environments play, by their weights."""

    def __init__(
        self, run: RunConfig, specs: Sequence[EnvSpec], renderer: Renderer, host: EnvHost, display: Display
    ) -> None:
        self._run, self._specs, self._renderer, self._host, self._display = run, specs, renderer, host, display
        self._experts = [environments.open_expert(section.id, section.options) for section in run.envs]
        self._is_tiny = policy_kind(run) == "tiny"

    async def source(self) -> Source:
        run, section = self._run, self._run.imitation
        updates, size = filled(section.updates), filled(section.batch)
        single, several = _SHARES[policy_kind(run)] if run.renderer.history == "all" else (1.0, 0.0)
        until_single = round(updates * single)
        until_several = until_single + round(updates * several)
        seed = stable_hash(run.seed, "lessons")
        noise = section.random_share if self._is_tiny else 0.0
        book = LessonBook(await self._lessons(seed), _HAZARD_SHARE, noise, seed)
        one_state, states = book.batches(size), book.batches(size, states=max(2, run.rollout.max_turns // 2))
        per_update = max(1, size // _STATES_PER_EPISODE)
        episodes = await self._episodes((updates - until_several) * per_update)

        def batch(update: int) -> Sequence[Sample]:
            if update < until_single:
                return one_state(update)
            if update < until_several:
                return states(update)
            first = (update - until_several) * per_update
            return [sample for one in episodes[first : first + per_update] for sample in one.samples]

        known = [one.success for one in episodes if one.success is not None]
        facts = {"demonstrator_success": sum(known) / len(known) if known else None}
        return Source(updates, batch, until_several if until_several < updates else 0, facts)

    def _teacher(self, index: int, noise: float) -> Teacher:
        is_bare = self._run.imitation.answers == "bare"
        limit = limits_of(self._run.rollout).turn_tokens
        return Teacher(self._experts[index], self._renderer, noise, is_bare, limit)

    def _parts(self, total: int, seed: int) -> Iterator[tuple[int, int, Iterator[Task]]]:
        """Divide `total` by weight. Yield for each environment its index, its part of `total`, and its tasks."""
        parts = zip(self._run.envs, self._specs, parts_of(self._run, total), strict=True)
        for index, (section, spec, part) in enumerate(parts):
            yield index, part, map(partial(task_sets.task, spec, section.options, "train", seed), count())

    async def _lessons(self, seed: int) -> list[Lesson]:
        section, display = self._run.imitation, self._display
        needed = filled(section.states)
        display.phase("prepare lessons", needed)
        found: list[Lesson] = []
        for index, part, tasks in self._parts(needed, seed):
            teacher = self._teacher(index, section.random_share)
            found += await demonstrations.lessons(self._host, teacher, tasks, part, seed, on_lesson=display.advance)
        return found

    async def _episodes(self, needed: int) -> list[Demonstration]:
        if not needed:
            return []
        seed, display = stable_hash(self._run.seed, "episodes"), self._display
        display.phase("prepare episodes", needed)
        found: list[Demonstration] = []
        for index, part, tasks in self._parts(needed, seed):
            teacher = self._teacher(index, _EPISODE_RANDOM_SHARE if self._is_tiny else 0.0)
            end, limits = len(found) + part, limits_of(self._run.rollout)
            while len(found) < end:
                at_once, drawn = min(_PART, end - len(found)), stable_hash(seed, len(found))
                played = await demonstrations.demonstrations(self._host, teacher, tasks, at_once, drawn, limits)
                if not any(one.samples for one in played):
                    raise ConfigError([f"rollout.max_tokens: {limits.max_tokens} is too small for a demonstrated turn"])
                found += [one for one in played if one.samples]
                display.advance(at_once)
        if len(self._experts) > 1:
            random.Random(seed).shuffle(found)
        return found
