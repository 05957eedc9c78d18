"""The launchers for this machine, where a process in a session of its own leaves nothing behind, and for a cluster."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeAlias

import anyio

from envkit import clock
from envkit.errors import UsageError
from envkit.types import THIS_NODE, Node, Place

from . import supervise
from .supervise import TERM_S, end_group

LOOPBACK = "127.0.0.1"
"""Servers on this machine listen only here: the routes of many ask for no password."""
_KILL_TERM_S = 2.0
"""Seconds between SIGTERM and SIGKILL for processes that hang."""
_GPU = re.compile(r"nvidia\d+")
LAST_WORDS = "envkit: "
"""Beginning of the line in which a relay of envkit says why it ended."""
_LAST_WORDS = re.compile(rf"^(?:{LAST_WORDS}|srun: error: )(.{{1,300}})", re.M)
_TAIL = 1 << 16
"""Bytes at the end of a relay's log in which its last words are searched."""

_PORTS = range(20_000, 30_000)
"""Ports of servers on other nodes: neither Ray's workers nor the kernel's outgoing connections use them by default."""

Relay: TypeAlias = Callable[[Sequence[str], Mapping[str, str], Place, Node], tuple[Sequence[str], Mapping[str, str]]]
"""Returns a program, and variables for it, that runs another one on a node, and stands for it here: output, exit code,
and end. It gets the arguments of `Launcher.start`, and the node."""


class LocalProcess:
    """A process of this machine. It implements `envkit.protocols.Process`.

    Its first process is a supervisor (`supervise`), which ends the others when the program or this process is killed,
    or when the thread that started it ends. If the supervisor is killed too, the program gets SIGTERM.

    Args:
        process: The supervisor, started in this thread.
        log: The file of its output.
        is_relay: Whether the program is a relay, whose log says why it ended.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, *, is_relay: bool) -> None:
        self.pid = process.pid
        self.log = log
        self._process = process
        self._is_relay = is_relay
        self._reason = ""
        self._ended = anyio.Event()
        self._clearing = anyio.Lock()
        pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(pidfd, self._on_end, pidfd)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> str:
        await self._ended.wait()
        with anyio.CancelScope(shield=True):
            await self._clear(TERM_S)
        return self._reason

    async def kill(self, *, grace_s: float = 25.0) -> None:
        """See `envkit.protocols.Process.kill`. The supervisor has limits of its own, which take 25 s in all."""
        with anyio.CancelScope(shield=True):
            if is_ordered := grace_s > 0 and not self._ended.is_set():
                self._process.send_signal(signal.SIGTERM)
                with anyio.move_on_after(grace_s):
                    await self._ended.wait()
            await self._clear(TERM_S if grace_s else _KILL_TERM_S)
            if is_ordered:
                self.log.unlink(missing_ok=True)

    def _on_end(self, pidfd: int) -> None:
        # The process is not waited for yet: until `_clear` has ended its group, the kernel must not reuse its pid.
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._ended.set()

    async def _clear(self, term_s: float) -> None:
        """End all remaining processes, and wait for the first one; idempotent."""
        async with self._clearing:
            if self._reason:
                return
            await clock.to_thread(end_group, self.pid, term_s=term_s)
            with anyio.move_on_after(_KILL_TERM_S):  # a process that is blocked in I/O may never end
                await self._ended.wait()
            self._process.poll()
            words = await clock.to_thread(_last_words, self.log) if self._is_relay and self.returncode else ""
            self._reason = words or _reason(self.returncode)


class LocalLauncher:
    """Starts processes on this machine. It implements `envkit.protocols.Launcher`."""

    def __init__(self) -> None:
        self.nodes = (this_node(),)

    async def endpoint(self, node: str, port: int | None = None) -> tuple[str, int]:
        find(self.nodes, node)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port or 0))
            except OSError as error:
                raise UsageError(f"cannot listen on port {port} ({error.strerror}); choose another one") from None
            return LOOPBACK, int(probe.getsockname()[1])

    async def start(self, argv: Sequence[str], env: Mapping[str, str], *, place: Place, name: str) -> LocalProcess:
        node = find(self.nodes, place.node)
        gpus = (
            {} if place.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(node.gpus[index] for index in place.gpus)}
        )
        return start(argv, {**env, **gpus}, name=name)


class RelayLauncher:
    """Starts processes on this node directly, and on others by relays. It implements `envkit.protocols.Launcher`."""

    def __init__(self, others: Sequence[Node], relay: Relay) -> None:
        self._local = LocalLauncher()
        self._relay = relay
        self.nodes = (*self._local.nodes, *others)

    async def endpoint(self, node: str, port: int | None = None) -> tuple[str, int]:
        """See `envkit.protocols.Launcher.endpoint`. A port on another node is drawn, and not checked."""
        if node == THIS_NODE:
            return await self._local.endpoint(node, port)
        return find(self.nodes, node).address, port or _PORTS[secrets.randbelow(len(_PORTS))]

    async def start(self, argv: Sequence[str], env: Mapping[str, str], *, place: Place, name: str) -> LocalProcess:
        """See `envkit.protocols.Launcher.start`. The GPUs on another node are as many, chosen by the cluster."""
        if place.node == THIS_NODE:
            return await self._local.start(argv, env, place=place, name=name)
        node = find(self.nodes, place.node)
        words, variables = self._relay(argv, env, place, node)
        return start(words, variables, name=name, is_relay=True)


def start(argv: Sequence[str], env: Mapping[str, str], *, name: str, is_relay: bool = False) -> LocalProcess:
    """Start a program on this machine; see `LocalProcess`, and `envkit.protocols.Launcher.start` for the rest.

    Raises:
        UsageError: This is not Linux.
    """
    if sys.platform != "linux":
        raise UsageError(f"{name} can be started only on Linux; start it elsewhere, and give its address to the run")
    handle, log = tempfile.mkstemp(prefix=f"envkit-{name}-", suffix=".log")
    # The kernel sends the parent-death signal when the thread ends that started the child. So start it in the event
    # loop's thread, although that blocks the loop for some milliseconds.
    with os.fdopen(handle, "wb") as output, ExitStack() as undo:
        undo.callback(os.unlink, log)
        process = subprocess.Popen(
            [sys.executable, "-IS", supervise.__file__, str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
        undo.callback(process.terminate)
        started = LocalProcess(process, Path(log), is_relay=is_relay)
        undo.pop_all()
    return started


def this_node(variables: Mapping[str, str] = os.environ, *, machine: Path = Path("/")) -> Node:
    """Return this machine. Its GPUs, devices below `machine`, are those that CUDA_VISIBLE_DEVICES leaves visible."""
    devices = machine / "dev"
    count = sum(_GPU.fullmatch(entry.name) is not None for entry in devices.iterdir()) if devices.is_dir() else 0
    gpus = [str(number) for number in range(count)]
    if count and (visible := variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        named = [word.strip() for word in visible.split(",")]
        gpus = named[: next((index for index, word in enumerate(named) if word in ("", "-1")), None)]
    host = socket.gethostname()
    return Node(name=THIS_NODE, id=host, host=host, address=LOOPBACK, gpus=tuple(gpus), cpus=os.cpu_count() or 1)


def find(nodes: Sequence[Node], name: str) -> Node:
    """Return the node with this name.

    Raises:
        UsageError: No node has this name.
    """
    for node in nodes:
        if node.name == name:
            return node
    raise UsageError(f"there is no node {name}; there are {', '.join(node.name for node in nodes)}")


def _last_words(log: Path) -> str:
    """Return what a relay has written last about why it ended; empty without it."""
    words: list[str] = []
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        words = _LAST_WORDS.findall(file.read(_TAIL).decode(errors="replace"))
    return words[-1] if words else ""


def _reason(returncode: int | None) -> str:
    if returncode is None:
        return "it does not end"
    return f"killed by signal {-returncode}" if returncode < 0 else f"exited with code {returncode}"
