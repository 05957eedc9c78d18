"""A real Ray cluster as tests see it, which runs in a process of its own: `tests.sandbox.ray.ray_cluster`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.contract.kinds import arguments, processes

_LOG_CHARACTERS = 2000


class Cluster:
    """A cluster in a process of its own, its head at a port if one is given; it begins when it is waited for.

    Ray's default folder and its home are inside `folder`, as on a machine where Ray never ran.
    """

    def __init__(self, folder: str, nodes: int, port: int = 0) -> None:
        self.folder = folder
        self._log = Path(folder, "log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.sandbox.ray.ray_cluster", folder, str(nodes), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "HOME": folder, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"},
                cwd=Path(__file__).parents[3],
                start_new_session=True,
            )
        self.address = ""
        self.head = ""

    def wait(self) -> None:
        """Return once it is up; `head` is then the end of its head's name in a pool."""
        self.address, self.head, *_ = self._ask("begin")

    def add(self) -> str:
        """Add a node, and return the end of its name in a pool."""
        return self._ask("add")[0]

    def kill(self, tail: str) -> None:
        """Kill the node whose name ends so, which may not be the head."""
        self._ask(f"kill {tail}")

    def behead(self) -> None:
        """Kill its head's server."""
        self._ask("behead")

    def freeze(self) -> None:
        """Stop the daemons of its nodes, but not the actors: they would busy-wait beside another head at its port."""
        self._ask("freeze")

    def actors(self) -> list[int]:
        """The processes of actors of ours."""
        return [pid for pid in processes() if self._is_actor(pid)]

    def _is_actor(self, pid: int) -> bool:
        if not b"".join(arguments(pid)).startswith(b"ray::NodeActor"):
            return False
        with suppress(OSError):
            return any(fd.readlink().is_relative_to(self.folder) for fd in Path(f"/proc/{pid}/fd").iterdir())
        return False

    def _ask(self, order: str) -> list[str]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> list[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("> "):
                return line.split()[1:]
        raise AssertionError(f"the Ray cluster has ended: {self._log.read_text(errors='replace')[-_LOG_CHARACTERS:]}")


@contextmanager
def running(nodes: int, port: int = 0) -> Iterator[Cluster]:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of its sockets are long
    try:
        made = Cluster(folder, nodes, port)
        with made.process as process:
            try:
                yield made
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # all of Ray's processes; sandboxes are in groups of their own
    finally:
        shutil.rmtree(folder, ignore_errors=True)
