"""Asynchronous training on a terminal, in sandboxes of the backend ``local`` of which some are killed.

The policy plays by a script. It has the parts of a package: an engine, a renderer and a trainer without a model.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio

import envkit
from envkit import clock
from envkit.config.grammar import Section
from envkit.config.parts import EngineSection, RendererSection, TrainerSection
from envkit.environments.tools import write_call
from envkit.wiring.contexts import EngineContext, RendererContext, TrainerContext
from tests.contract.kinds import agent_above, new_marker, sleepers, until
from tests.environments.terminal.tiny import SOLUTION, write_tiny
from tests.trainer_bridge.fakes import Call, LetterRenderer, ScriptedEngine, ScriptedTrainer

PATIENCE_S = 400
"""After which a run hangs."""
script: list[Callable[[Call], str]] = []
"""What the engines say that are opened from now on: the last one."""


class ScriptedEngineSection(EngineSection):
    kind: Literal["scripted"] = "scripted"


class ScriptedRendererSection(RendererSection):
    kind: Literal["letters"] = "letters"


class ScriptedTrainerSection(TrainerSection):
    kind: Literal["scripted"] = "scripted"


@dataclass(frozen=True)
class Kind:
    """What an entry point names."""

    section: type[Section]
    open: Callable[[Any], Any]


@asynccontextmanager
async def open_engine(context: EngineContext) -> AsyncIterator[ScriptedEngine]:
    yield ScriptedEngine(script[-1])


def open_renderer(context: RendererContext) -> LetterRenderer:
    return LetterRenderer()


class Trainer(ScriptedTrainer):
    """A trainer whose checkpoints have the folder of a policy, as that of a package must have."""

    async def save(self, folder: str) -> None:
        await super().save(folder)
        (Path(folder) / "policy").mkdir(exist_ok=True)


def open_trainer(context: TrainerContext) -> Trainer:
    return Trainer()


ENGINE = Kind(ScriptedEngineSection, open_engine)
RENDERER = Kind(ScriptedRendererSection, open_renderer)
TRAINER = Kind(ScriptedTrainerSection, open_trainer)


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Install the package for this process, in a new folder."""
    metadata = folder / "scripted-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted\nVersion: 1.0\n")
    points = {"engines": "scripted", "renderers": "letters", "trainers": "scripted"}
    lines = [f"[envkit.{group}]\n{name} = {__name__}:{group[:-1].upper()}\n" for group, name in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def policy(markers: Mapping[str, str], kills: Mapping[str, int]) -> Callable[[Call], str]:
    """Return what the policy says: the first member of a group solves the task, and the others submit at once.

    An attempt that is to be killed sleeps for the time in `markers`.
    """
    turns: Counter[str] = Counter()

    def say(call: Call) -> str:
        if call.session is None:
            return "x"  # the probe
        key, _, attempt = call.session.rpartition(".")
        turns[call.session] += 1
        command = SOLUTION if key.endswith("/0000") else "true"
        if int(attempt) < kills.get(key, 0):
            command = f"sleep {markers[key]}"
        return [write_call("bash", command=command), write_call("submit")][turns[call.session] - 1]

    return say


def train_and_kill(place: Path, kills: Mapping[str, int], *, steps: int, groups: int, size: int) -> None:
    """Train in the folder ``run`` below `place`, and kill the sandboxes of some episodes while they play.

    Args:
        place: An empty folder.
        kills: Number of attempts whose sandboxes are killed, by the key of an episode; see `accounts.key`.
        steps: Number of train steps.
        groups: Groups of a train step.
        size: Episodes of a group.
    """
    markers = {key: new_marker() for key in kills}
    script.append(policy(markers, kills))
    content = {
        "env": {"id": "Terminal-v0", "num_envs": 4, "options": {"tasks": str(write_tiny(place))}},
        "sandbox": {"kind": "local"},
        "engine": {"kind": "scripted"},
        "renderer": {"kind": "letters"},
        "rollout": {"group_size": size, "max_turns": 4, "max_tokens": 100_000, "asynchronous": True},
        "trainer": {"kind": "scripted", "steps": steps, "groups_per_step": groups},
        "evaluation": {"episodes": 0},
        "tracking": {"trajectories_every": 1, "trajectories": 1000, "to": []},
        "diagnostics": {"stop_on": []},
    }

    async def kill(marker: str, attempts: int) -> None:
        for _ in range(attempts):
            await until(lambda: bool(sleepers(marker)), PATIENCE_S)
            os.kill(agent_above(sleepers(marker)[0]), signal.SIGKILL)
            await until(lambda: not sleepers(marker), PATIENCE_S)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(clock.to_thread, partial(envkit.train, content, output=place / "run"))
            for key, attempts in kills.items():
                tasks.start_soon(kill, markers[key], attempts)

    with installed(place / "site"):
        clock.run(main)
