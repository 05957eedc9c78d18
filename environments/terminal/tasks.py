"""Tasks of a terminal: what the agent is asked, what its sandbox contains, and how the result is verified.

A task is a folder in the format of Harbor; `envkit.environments.terminal.formats` reads and writes such folders.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from envkit.runs.owners import owner_name

WORK = "/workspace"
"""Working directory of portable tasks."""
TIMEOUT_S = 600.0
"""Default timeout of a verifier, and of the build of an image, in seconds."""

Profile = Literal["strict", "system"]


Timeout = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_Wait = Annotated[float, msgspec.Meta(ge=0, le=600)]


def _key(name: str) -> str:
    """Return the key of an attribute in ``task.toml``: ``timeout_sec`` of ``timeout_s``."""
    return f"{name}ec" if name.endswith("_s") else name


class Healthcheck(msgspec.Struct, frozen=True, kw_only=True, rename=_key):
    """A command of the shell that must succeed before the agent starts.

    It has `timeout_s` for an attempt, and `retries` attempts, `interval_s` apart. Failed attempts in the first
    `start_period_s`, which are `start_interval_s` apart, do not count.
    """

    command: str
    interval_s: _Wait = 5.0
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 30.0
    start_period_s: _Wait = 0.0
    start_interval_s: _Wait = 5.0
    retries: int = 3


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A path of the agent's sandbox that a verifier in its own sandbox sees.

    Attributes:
        source: Absolute path of a file or folder.
        exclude: Patterns of names that are left out, as for ``tar --exclude``.
        service: Name of the container, which must be ``main``.
    """

    source: str
    exclude: tuple[str, ...] = ()
    service: str = "main"


class Collect(msgspec.Struct, frozen=True, kw_only=True, rename=_key):
    """A command that runs in the agent's sandbox before its artifacts are collected; see `Artifact.service`."""

    command: str
    timeout_s: Timeout = 60.0
    service: str = "main"


class ScratchFolder:
    """A temporary folder that is removed with the last reference to this object, and at the end of the process.

    If the process is killed, the next process that opens sandboxes removes the folder: see
    `envkit.sandbox.host.run_dirs`.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{owner_name(os.getpid())}-task-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """How the result of a task is verified.

    Attributes:
        tests: Folder with the tests, whose ``test.sh`` writes the reward.
        is_separate: Whether the tests run in a sandbox of their own, which sees only the artifacts.
        dockerfile: Dockerfile of the verifier's image; None for the image of the environment.
        image: Name of the verifier's image; empty for that of `dockerfile` or of the environment.
        collect: Commands to run in the agent's sandbox before artifacts are collected.
        reads: ``"reward"``: the tests write ``reward.json`` or ``reward.txt``. ``"pytest"``: they print a summary of
            pytest, in which all tests must have passed.
    """

    tests: Path
    timeout_s: float = TIMEOUT_S
    env: Mapping[str, str] = field(default_factory=dict)
    is_separate: bool = True
    dockerfile: Path | None = None
    image: str = ""
    collect: tuple[Collect, ...] = ()
    reads: Literal["reward", "pytest"] = "reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    """A task.

    Attributes:
        name: Name of the task, such as ``org/name``.
        instruction: What the agent is asked.
        solution: Folder with ``solve.sh``, which solves the task; None if unknown.
        later: The steps after the first one, which is this task; they differ in the attributes around this one, and in
            their names, such as ``org/name (second)``.
        step_setup: Script of this machine that runs in the sandbox before the step; None for none.
        step_healthcheck: Must succeed before the step; None for none.
        min_reward: The next step begins only if this one has earned at least this reward.
        reward: Reward of several steps: their mean, where steps that were not reached count 0, or that of the last one.
        timeout_s: Maximum seconds of the agent's tool calls; None for the limit of the environment.
        environment: Folder with the files of the environment and, unless `image` is set, its Dockerfile.
        image: Name of the environment's Docker image; empty to build one from the Dockerfile.
        is_portable: Whether the environment consists of the files of `environment`, `setup` and `programs`, so that
            sandboxes without an image of the task can play it. `workdir` is then `WORK`.
        setup: Script in `environment` that the agent's user runs in `WORK` to complete a portable environment; empty
            for none.
        programs: Programs that a portable task needs besides ``sh``, ``bash``, ``python3`` and the coreutils.
        packages: Debian packages that the image of a portable task has besides Python.
        profile: Profile of the sandboxes. In ``"system"``, all programs of the agent and of the verifier run as root.
        workdir: Working directory of the agent and of the tests; empty for that of the image.
        cpus, memory_mib, disk_mib: Limits of the sandbox; None for the default.
        network: Network that the task asks for: ``"none"``, ``"open"`` or a tuple of hosts.
        artifacts: What a verifier in its own sandbox sees; if empty, the working directory.
        difficulty, category: As the task declares them; empty if unknown.
        cheats: Scripts by name that try to earn a reward without solving the task.
        notes: What envkit does not support in this task, one line each.
        scratch: Keeps `folder` if the task is generated, or tests and solution of a task of Terminal-Bench.
    """

    name: str
    folder: Path
    instruction: str
    verifier: Verifier
    solution: Path | None = None
    later: tuple[TerminalTask, ...] = ()
    step_setup: Path | None = None
    step_healthcheck: Healthcheck | None = None
    min_reward: float = -math.inf
    reward: Literal["mean", "final"] = "mean"
    timeout_s: float | None = None
    environment: Path
    image: str = ""
    is_portable: bool = False
    setup: str = ""
    programs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    profile: Profile = "system"
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: float | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    network: str | tuple[str, ...] = "none"
    healthcheck: Healthcheck | None = None
    solution_env: Mapping[str, str] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    difficulty: str = ""
    category: str = ""
    cheats: Mapping[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    scratch: ScratchFolder | None = None
