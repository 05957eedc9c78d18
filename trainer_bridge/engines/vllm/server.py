"""A vLLM server: starts it through a launcher, waits until it answers, and finds in its log why it did not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import httpx

from envkit import clock
from envkit.errors import UsageError
from envkit.protocols import Launcher, Process
from envkit.types import Place

from .launch import ServerSettings, command, environment, is_built_for_cpus

_LOOPBACK = "127.0.0.1"
_HERE = Place()
_POLL_S = 0.25
"""Seconds between two requests to a server that starts."""
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
    """A vLLM server. After it has ended, `start` starts it again.

    On this machine, it listens only to this machine. Elsewhere it listens to the network: its routes ask for no
    password and can read any file, so the network must be private.

    `launcher` starts its process at `place`, and chooses its port unless it is given. `announce` receives lines for the
    user about the start.

    Attributes:
        url: Address of the server; empty before `start`.
        pid: See `envkit.protocols.Process.pid`; 0 before `start`.
        log: The server's output. The file is deleted by `stop`, but not if the server ended by itself.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        launcher: Launcher,
        place: Place = _HERE,
        port: int | None = None,
        announce: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.url = ""
        self.pid = 0
        self.log = Path(os.devnull)
        self._settings = settings
        self._launcher = launcher
        self._place = place
        self._port = port
        self._announce = announce
        self._process: Process | None = None

    async def start(self, timeout_s: float) -> None:
        """Start the server, and wait until it answers.

        Raises:
            UsageError: It ended, or did not answer within `timeout_s` seconds. The message contains the cause, and the
                path of the log. None of its processes runs any more.
        """
        await self.kill()
        on_cpu = await clock.to_thread(is_built_for_cpus, self._settings.python)
        host, port = await self._launcher.endpoint(self._place.node, self._port)
        self.url = f"http://{host}:{port}"
        began_s = clock.now()
        words = command(self._settings, host=host, port=port, on_cpu=on_cpu)
        variables = environment(self._settings, os.environ, on_cpu=on_cpu)
        process = await self._launcher.start(words, variables, place=self._place, name="vllm")
        self._process, self.pid, self.log = process, process.pid, process.log
        where = "" if host == _LOOPBACK else f" on {self._place} ({host}), in a network that must be private,"
        self._announce(f"starting vLLM with {self._settings.model}{where}; its log is {self.log}")
        try:
            with anyio.move_on_after(timeout_s):
                await self._wait_until_ready(process)
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
        """Wait until the server has ended, with all its processes, and return why."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    async def stop(self) -> None:
        """End the server and delete its log; see `envkit.protocols.Process.kill`."""
        if self._process is not None:
            await self._process.kill()

    async def kill(self) -> None:
        """End all processes of a server that hangs, even if they are stopped or ignore SIGTERM. Idempotent."""
        if self._process is not None:
            await self._process.kill(grace_s=0)

    async def _wait_until_ready(self, process: Process) -> None:
        """Wait until the server answers; raise a `UsageError` if it has ended."""
        began_s, minutes = clock.now(), 0
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while process.returncode is None:
                if clock.now() - began_s > 60 * (minutes + 1):
                    minutes += 1
                    self._announce(f"vLLM is still starting after {60 * minutes} s")
                try:
                    if (await client.get(f"{self.url}/health")).status_code == httpx.codes.OK:
                        return
                except httpx.HTTPError:
                    pass
                with anyio.move_on_after(_POLL_S):
                    await process.wait()
        await process.wait()
        why = await clock.to_thread(why_not_started, self.log, process.returncode)
        raise UsageError(f"the vLLM server did not start: {why}; its log is {self.log}")


def why_not_started(log: Path, returncode: int | None) -> str:
    """Return why a server ended before it was ready, in one line, from its log.

    `returncode` is its exit code, or the negative number of a signal; None if it was ended because it took too long.
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
