"""A vLLM server: starts it, finds in its log why it did not start, watches it, and ends all its processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import httpx

from envkit import clock
from envkit.errors import UsageError

from .interpreter import is_built_for_cpus
from .launch import PLUGIN, ServerSettings, command, environment
from .plugin.envkit_processes import TERM_S, end_group

HOST = "127.0.0.1"
"""The server's routes need no password and can read any file, so it must not listen to other machines."""
_POLL_S = 0.25
"""Seconds between two requests to a server that starts."""
_STOP_S = 25.0
"""Seconds for the supervisor to end the server, which has limits of its own."""
_KILL_TERM_S = 2.0
"""Seconds between SIGTERM and SIGKILL for a server that hangs."""
_CAUSES: Mapping[str, str] = {
    r"Failed to load plugin|weight transfer.*envkit_file|envkit_file.*(not|un)": (
        "vLLM could not load envkit's weight plug-in"
    ),
    r"out of memory|MemoryError|No available memory|Cannot allocate memory|larger than the available"
    r"|Free memory on device|DefaultCPUAllocator": (
        "it ran out of memory; lower the variable VLLM_CPU_KVCACHE_SPACE (GiB) on a CPU or "
        "engine.gpu_memory_utilization on a GPU, or use a smaller model"
    ),
    r"No module named '?vllm": "the package vllm is not installed for this interpreter",
    r"[Aa]ddress already in use": "another program took the port",
    r"unrecognized arguments|error: argument|invalid choice": "vLLM does not accept an argument; see engine.arguments",
}
"""Causes by the regular expression that finds them in a log, the most specific first."""
_PREFIX = r"^(?:\([^)]*\) )?(?:[A-Z]+ [^\]]*\] )?"
"""The prefix of a line of vLLM's log: process, level, time and source."""
_ERROR = re.compile(_PREFIX + r"((?:\w+\.)*\w*(?:Error|Exception|error)\b: .+)$")
_FOLLOWED = "Engine core initialization failed"
"""Part of the error that follows the cause, which an earlier line contains."""
_MAX_LINE = 400


class VllmServer:
    """A vLLM server in a session of its own. After it has ended, `start` starts it again.

    Its first process is a supervisor (`plugin/supervise.py`). The supervisor ends the others when the server or this
    process is killed, or when the thread that called `start` ends. If the supervisor is killed too, the server itself
    gets SIGTERM.

    Args:
        settings: Its settings.
        port: Its port; None picks a free one.
        announce: Receives lines for the user about the start.

    Attributes:
        url: Address of the server; empty before `start`.
        pid: Pid of the supervisor, which is also the id of its session and process group; 0 before `start`.
        log: The server's output. The file is deleted by `stop`, but not if the server ended by itself.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        port: int | None = None,
        announce: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.url = ""
        self.pid = 0
        self.log = Path(os.devnull)
        self._settings = settings
        self._port = port
        self._announce = announce
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cleared = True
        self._pidfd = -1
        self._leader_ended = anyio.Event()
        self._clearing = anyio.Lock()
        self._reason = "it was not started"

    async def start(self, timeout_s: float) -> None:
        """Start the server, and wait until it answers.

        Raises:
            UsageError: It ended, or did not answer within `timeout_s` seconds. The message contains the cause, and the
                path of the log. None of its processes runs any more.
        """
        if sys.platform != "linux":
            raise UsageError("vLLM servers can be started only on Linux; start one elsewhere, and set engine.url")
        on_cpu = await clock.to_thread(is_built_for_cpus, self._settings.python)
        port = _usable_port(self._port)
        self.url = f"http://{HOST}:{port}"
        began_s = clock.now()
        self._leader_ended = anyio.Event()
        self._launch(
            command(self._settings, host=HOST, port=port, on_cpu=on_cpu),
            environment(self._settings, os.environ, on_cpu=on_cpu),
        )
        self._announce(f"starting vLLM with {self._settings.model}; its log is {self.log}")
        try:
            with anyio.move_on_after(timeout_s):
                await self._wait_until_ready()
                self._announce(f"vLLM answers at {self.url} after {clock.now() - began_s:.0f} s")
                return
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self.kill()
            if not isinstance(error, Exception):  # the start was cancelled
                self.log.unlink(missing_ok=True)
            raise
        await self.kill()
        why = await clock.to_thread(why_not_started, self.log, None)
        raise UsageError(f"the vLLM server did not answer within {timeout_s:g} s: {why}; its log is {self.log}")

    async def wait_ended(self) -> str:
        """Wait until the server has ended, end the rest of its processes, and return why it ended."""
        await self._leader_ended.wait()
        with anyio.CancelScope(shield=True):
            await self._clear()
        return self._reason

    async def stop(self) -> None:
        """End the server and all its processes, and delete its log. Idempotent; cannot be cancelled."""
        with anyio.CancelScope(shield=True):
            if self._process is None:
                return
            ended_by_itself = self._leader_ended.is_set()
            if not ended_by_itself:
                self._process.send_signal(signal.SIGTERM)
                with anyio.move_on_after(_STOP_S):
                    await self._leader_ended.wait()
            await self._clear()
            if not ended_by_itself:
                self.log.unlink(missing_ok=True)

    async def kill(self) -> None:
        """End all processes of a server that hangs, even if they are stopped or ignore SIGTERM. Idempotent."""
        with anyio.CancelScope(shield=True):
            if self._process is not None:
                await self._clear(term_s=_KILL_TERM_S)

    def _launch(self, words: list[str], variables: dict[str, str]) -> None:
        handle, name = tempfile.mkstemp(prefix="envkit-vllm-", suffix=".log")
        self.log = Path(name)
        # The kernel sends the parent-death signal when the thread ends that started the child. So start it in the event
        # loop's thread, although that blocks the loop for some milliseconds.
        with os.fdopen(handle, "wb") as log:
            self._process = subprocess.Popen(
                [self._settings.python, str(PLUGIN / "supervise.py"), str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        self.pid, self._is_cleared = self._process.pid, False
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_leader_end)

    def _on_leader_end(self) -> None:
        # The process is not waited for yet: until `_clear` has ended its group, the kernel must not reuse its pid.
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._leader_ended.set()

    async def _wait_until_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            UsageError: It has ended.
        """
        began_s, minutes = clock.now(), 0
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while not self._leader_ended.is_set():
                if clock.now() - began_s > 60 * (minutes + 1):
                    minutes += 1
                    self._announce(f"vLLM is still starting after {60 * minutes} s")
                try:
                    if (await client.get(f"{self.url}/health")).status_code == httpx.codes.OK:
                        return
                except httpx.HTTPError:
                    pass
                with anyio.move_on_after(_POLL_S):
                    await self._leader_ended.wait()
        await self._clear()
        assert self._process is not None
        why = await clock.to_thread(why_not_started, self.log, self._process.returncode)
        raise UsageError(f"the vLLM server did not start: {why}; its log is {self.log}")

    async def _clear(self, *, term_s: float = TERM_S) -> None:
        """End all remaining processes of the server, and wait for its first one; idempotent."""
        assert self._process is not None
        async with self._clearing:
            if self._is_cleared:
                return
            await clock.to_thread(end_group, self.pid, term_s=term_s)
            with anyio.move_on_after(_KILL_TERM_S):  # a process that is blocked in I/O may never end
                await self._leader_ended.wait()
            self._reason = _reason(self._process.poll())
            self._is_cleared = True


def _usable_port(port: int | None) -> int:
    """Return `port`, or a free one.

    Raises:
        UsageError: The port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port or 0))
        except OSError as error:
            raise UsageError(f"cannot listen on port {port} ({error.strerror}); choose another one") from None
        return int(probe.getsockname()[1])


def _reason(returncode: int | None) -> str:
    if returncode is None:
        return "it does not end"
    return f"killed by signal {-returncode}" if returncode < 0 else f"exited with code {returncode}"


def why_not_started(log: Path, returncode: int | None) -> str:
    """Return why a server ended before it was ready, in one line, from its log.

    Args:
        log: Its standard output and error.
        returncode: Its exit code, or the negative number of a signal; None if it was ended because it took too long.
    """
    lines = [line.rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    for pattern, cause in _CAUSES.items():
        if line := next((line for line in lines if re.search(pattern, line)), None):
            return f"{cause} ({_shown(line)})"
    if returncode == -9:
        return "it was killed, probably because the machine ran out of memory"
    errors = [found[1] for line in lines if (found := _ERROR.match(line)) and _FOLLOWED not in line]
    if errors:
        return errors[0][:_MAX_LINE]
    return _shown(lines[-1]) if lines else "its log is empty"


def _shown(line: str) -> str:
    return re.sub(_PREFIX, "", line)[:_MAX_LINE]
