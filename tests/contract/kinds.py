"""Shared by the tests of every kind of sandbox: the kinds, a sandbox of each, and its traces on the machine."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import anyio
import pytest

from envkit import clock
from envkit.runs import owners
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.bubblewrap import host_python
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.host import run_dirs
from envkit.sandbox.process.backend import ProcessBackend
from envkit.types import SandboxSpec
from tests.contract.remote import RemoteBackend, WorkingSandbox
from tests.sandbox.containers import image

Backend: TypeAlias = LocalBackend | ProcessBackend | DockerBackend | RemoteBackend

SOON_S = 5.0
"""What takes a moment takes no longer on a machine where others work too."""

OF_HOST_IN_TMP = sorted({Path(path).parts[2] for path in host_python.readable() if path.startswith("/tmp/")})
"""Names in ``/tmp`` of a ``local`` sandbox: the folders with the host's Python, if that is below ``/tmp``."""

_BOOT = b"take(0,int(take(0,9)))"
"""Part of the command line of every agent."""


@dataclass(frozen=True)
class Kind:
    """A kind of sandbox.

    Attributes:
        name: Its name.
        backend: Makes its backend.
        python: Runs a Python in its sandboxes.
        has_images: Whether its sandboxes see an image.
    """

    name: str
    backend: Callable[[], Backend]
    python: str
    has_images: bool = False

    def spec(self, *command: str, **fields: object) -> SandboxSpec:
        return replace(SandboxSpec(command, image=image() if self.has_images else None), **fields)  # type: ignore[arg-type]

    def require(self, *limits: str) -> None:
        """Skip the test if the backend does not enforce `limits` here; some need root, for example."""

        async def capabilities() -> Mapping[str, bool]:
            async with self.backend() as backend:
                return backend.capabilities()

        enforced = clock.run(capabilities)
        if missing := [name for name in limits if not enforced[name]]:
            pytest.skip(f"{self.name}: not enforced here: {', '.join(missing)}")

    @asynccontextmanager
    async def sandbox(self, *command: str, **fields: object) -> AsyncIterator[AgentSandbox | WorkingSandbox]:
        """Start one for the length of the block."""
        async with self.backend() as backend:
            sandbox = await backend.start(self.spec(*command, **fields))
            assert isinstance(sandbox, (AgentSandbox, WorkingSandbox))
            yield sandbox


KINDS = {
    "local": Kind("local", LocalBackend, sys.executable),
    "process": Kind("process", ProcessBackend, sys.executable),
    "docker": Kind("docker", DockerBackend, "/usr/bin/python3", has_images=True),
    "remote": Kind("remote", RemoteBackend, sys.executable),
}
PARAMS = [
    pytest.param("local", marks=pytest.mark.bwrap),
    pytest.param("process"),
    pytest.param("docker", marks=pytest.mark.docker),
]
REMOTE = pytest.param("remote", marks=pytest.mark.bwrap)
LOCAL = PARAMS[:1]
"""For all cases about programs and files, whose code all kinds share; `ALSO_REMOTE` has one of each operation."""
ISOLATING = pytest.mark.parametrize("kind", [PARAMS[0], PARAMS[2]], indirect=True)
"""For cases about what only sandboxes that isolate can promise."""
ALSO_REMOTE = pytest.mark.parametrize("kind", [*PARAMS, REMOTE], indirect=True)
"""For one case of each operation and of each way to answer: a promise that a server on the way must keep too."""


def run(main: Callable[[], Awaitable[object]], timeout_s: float = 90) -> None:
    async def bounded() -> None:
        with anyio.fail_after(timeout_s):
            await main()

    clock.run(bounded)


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - it is about other processes, which tell nobody
            await anyio.sleep(0.01)


def new_marker() -> str:
    """Return a number of seconds that nobody else on the machine sleeps, by which a ``sleep`` is found again."""
    return f"{100_000 + secrets.randbelow(900_000)}.{secrets.randbelow(1_000_000):06}"


def sleepers(marker: str) -> list[int]:
    """The processes, anywhere on the machine, that sleep for `marker`."""
    return [pid for pid in processes() if arguments(pid)[:2] == [b"sleep", marker.encode()]]


def agent_above(pid: int) -> int:
    """The agent of the sandbox in which `pid` runs."""
    found = None
    while pid > 1:
        program, *rest = arguments(pid)
        if any(_BOOT in argument for argument in rest) and not program.startswith(b"envkit-"):  # bubblewrap's
            found = pid
        pid = parent(pid)
    assert found is not None
    return found


def traces() -> dict[str, set[str]]:
    """All that sandboxes of this process may leave on the machine: folders, mounts, containers and volumes."""
    here = f"-{os.getpid()}-"
    return {
        "folders": {str(path) for root in run_dirs.roots() for path in root.glob(f"envkit-*{here}*")},
        "mounts": {line for line in Path("/proc/self/mounts").read_text().splitlines() if here in line},
        "containers": set(containers()),
        "volumes": set(volumes()),
    }


def groups_of(pid: int) -> set[Path]:
    """Folders of the control groups that `pid` is in and we are not."""
    return _groups(pid) - _groups(os.getpid())


def containers(pid: int | None = None, *, state: str = "") -> list[str]:
    """Ids of the containers of process `pid`, or of this one; with `state`, only of those in this state."""
    chosen = ("--filter", f"status={state}") if state else ()
    return _of_owner(pid, "ps", "--all", *chosen, "--format", '{{.ID}} {{.Label "envkit.owner"}}')


def volumes(pid: int | None = None) -> list[str]:
    """Names of the volumes of process `pid`, or of this one."""
    return _of_owner(pid, "volume", "ls", "--format", '{{.Name}} {{.Label "envkit.owner"}}')


def _of_owner(pid: int | None, *arguments: str) -> list[str]:
    if shutil.which("docker") is None:
        return []
    owner = owners.owner_name(os.getpid()) if pid is None else f"-{pid}-"
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    return [line.split()[0] for line in done.stdout.splitlines() if owner in line.partition(" ")[2]]


def _groups(pid: int) -> set[Path]:
    found: set[Path] = set()
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        found |= {Path(f"/sys/fs/cgroup/{name}{path}") for name in controllers.split(",")}
    return {folder for folder in found if folder.is_dir()}


def processes() -> Iterator[int]:
    """Every process of the machine."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def arguments(pid: int) -> list[bytes]:
    """Its program and arguments; none once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")  # of a dead process: empty
    except OSError:
        return []


def parent(pid: int) -> int:
    """The process that started it."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
