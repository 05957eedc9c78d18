"""The vLLM server of the test run: ``envkit vllm`` with a small model in float32, for full weights and for adapters."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from envkit.wiring.launch.supervise import members

START_S = 240.0
LORA_RANK = 8


class VllmProcess:
    """A server in a process of its own.

    Args:
        model: Folder of the model.
        log: File for its output.
    """

    def __init__(self, model: Path, log: Path) -> None:
        self._model = model
        self._log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = int(free.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        words = ["vllm", str(self._model), "--port", str(self._port), "--max-tokens", "512"]
        words += ["--set", "dtype=float32", "--set", "max_num_seqs=16", "--lora-rank", str(LORA_RANK)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "envkit", *words], stdout=subprocess.PIPE, stderr=log
            )
        assert self._process.stdout is not None
        timer = threading.Timer(START_S, self._process.kill)
        timer.start()
        with self._process.stdout as output:
            line = output.readline()
        timer.cancel()
        assert line.startswith(b"ready"), self._log.read_text()

    def processes(self) -> list[int]:
        """The pids of the server's process group, its leader first; empty if it does not run."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        try:
            leaders = [int(word) for word in children.read_text().split()]
        except FileNotFoundError:
            return []
        return [pid for leader in leaders for pid in sorted(members(leader), key=lambda one: one != leader)]

    def wait(self) -> int:
        """Wait until ``envkit vllm`` has ended, and return its exit code."""
        assert self._process is not None
        return self._process.wait(30)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()


def alive(pids: list[int]) -> list[int]:
    """Those of `pids` that still run."""
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def child_named(pids: list[int], name: str) -> int | None:
    """The first of `pids` whose command line contains `name`."""
    for pid in pids:
        try:
            if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def shared_memory(pids: list[int]) -> set[Path]:
    """The files of shared memory that processes have mapped."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path("/dev/shm") / line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/psm_" in line}
