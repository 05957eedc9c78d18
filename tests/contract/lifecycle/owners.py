"""Processes that own sandboxes, for tests to kill: forked from one that has made the imports, which take a second."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TextIO, TypeAlias

import anyio
import pytest

from envkit import clock
from tests.contract.kinds import KINDS, Kind
from tests.contract.untidy import leave_everything

Role: TypeAlias = Callable[[Kind, str, TextIO], Awaitable[None]]


async def _talkative(kind: Kind, marker: str, test: TextIO) -> None:
    """Have a sandbox in which two processes sleep for the marker, and answer each line of the test."""
    interrupted: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(1))
    async with kind.sandbox("sh", "-c", "setsid sleep $0 & sleep $0", marker) as sandbox:
        print("ready", file=test)
        while True:
            await anyio.to_thread.run_sync(test.readline, abandon_on_cancel=True)
            result = await sandbox.exec(["echo", "alive"], timeout_s=10)
            print("interrupted" if interrupted else "", result.stdout, end="", file=test)


async def _busy(kind: Kind, marker: str, test: TextIO) -> None:
    """Start, use and stop sandboxes, three at once."""

    async def work() -> None:
        while True:
            sandbox = await backend.start(kind.spec("sleep", marker))
            await sandbox.exec(["true"], timeout_s=20)
            await sandbox.stop()

    async with kind.backend() as backend, anyio.create_task_group() as tasks:
        print("ready", file=test)
        for _ in range(3):
            tasks.start_soon(work)


async def _untidy(kind: Kind, marker: str, test: TextIO) -> None:
    """Have a sandbox in which everything is left behind."""
    async with kind.sandbox() as sandbox:
        await leave_everything(sandbox, kind.python, marker)
        print("ready", file=test)
        await anyio.sleep_forever()


async def _detached(kind: Kind, marker: str, test: TextIO) -> None:
    """Have a detached sandbox in which the marker sleeps, with the timeout of the first line; name it."""
    orphan_ttl_s = float(test.readline())
    async with kind.backend() as backend:
        spec = kind.spec("sleep", marker, detached=True, orphan_ttl_s=orphan_ttl_s, ttl_s=120)
        print((await backend.start(spec)).id, file=test)
        await anyio.sleep_forever()


OWNERS_TOGETHER = pytest.mark.xdist_group("owners")
"""Lets one worker run the tests with owners, so that only one process makes the imports."""

_ROLES: Mapping[str, Role] = {one.__name__[1:]: one for one in (_talkative, _busy, _untidy, _detached)}


@dataclass(frozen=True)
class Owner:
    """A process that owns sandboxes, the leader of a process group of its own.

    Attributes:
        pid: Its id.
        lines: Where it reads and writes lines.
    """

    pid: int
    lines: TextIO

    def ask(self, line: str) -> str:
        """Send a line, and return the answer."""
        print(line, file=self.lines)
        return self.lines.readline().strip()

    def kill(self) -> None:
        """End it with SIGKILL if it still runs, and wait until it is gone."""
        if Path(f"/proc/{self.pid}").exists():
            os.kill(self.pid, signal.SIGKILL)
        self.lines.read()  # until its end
        while Path(f"/proc/{self.pid}").exists():
            os.sched_yield()


class Owners:
    """Starts owners."""

    def __init__(self, orders: IO[str]) -> None:
        self._orders = orders

    @contextmanager
    def start(self, role: str, kind: Kind, marker: str) -> Iterator[Owner]:
        """Start one for the length of the block; see the functions above for what it does."""
        with tempfile.TemporaryDirectory(prefix="owner-") as folder, socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{folder}/s")
            door.listen()
            door.settimeout(60)
            print(role, kind.name, marker, f"{folder}/s", file=self._orders, flush=True)
            connection, _ = door.accept()
            with connection, closing(_lines(connection)) as lines:
                owner = Owner(int(lines.readline()), lines)
                try:
                    yield owner
                finally:
                    owner.kill()


@pytest.fixture(scope="session")
def owners() -> Iterator[Owners]:
    words = [sys.executable, "-m", __name__]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as parent:
        assert parent.stdin is not None
        yield Owners(parent.stdin)


def _lines(connection: socket.socket) -> TextIO:
    lines = connection.makefile("rw")
    lines.reconfigure(line_buffering=True)
    return lines


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # none is left
        pass


def main() -> None:
    """Fork an owner for each line of input."""
    signal.signal(signal.SIGCHLD, _reap)
    for order in sys.stdin:
        role, kind, marker, place = order.split()
        if not os.fork():
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(place)
            lines = _lines(connection)
            print(os.getpid(), file=lines)
            clock.run(partial(_ROLES[role], KINDS[kind], marker, lines))
            return


if __name__ == "__main__":
    main()
