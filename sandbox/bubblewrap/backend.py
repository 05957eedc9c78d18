"""Sandboxes of bubblewrap: namespaces of their own for processes, network, messages and host name, nothing to install
in them, no daemon, and a start that costs milliseconds.

What a box sees and where it can write is in `envkit.sandbox.bubblewrap.arguments`, what it may use of the machine in
`envkit.sandbox.host.cgroups`, what it may ask of the kernel in `envkit.sandbox.host.seccomp`. Its network holds nothing
but a loopback. Its first process is our agent; as root, that keeps the capabilities that it needs to start programs as
uid 1000 and graders as uid 1001, which have none. It dies with us, by the kernel's hand and by the end of the channel.

As root, each box has host uids of its own (`envkit.sandbox.bubblewrap.uid_ranges`), so it shares nothing that the
kernel counts by user. Where the machine allows no user namespaces, the uids are the host's, and what the kernel counts
for its user 1000 (inotify instances, queued signals, pipe memory) is shared with that user and between boxes;
`unenforced` then names ``"uid_range"``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from envkit import clock
from envkit.errors import SandboxError, SandboxLostError, SandboxRefusedError, SandboxStartError
from envkit.types import GRADER_HOME, Cause, CauseKind, SandboxSpec

from .. import agent
from ..agent_client.channel import AgentChannel, ChannelEndedError, SocketStream, Survived
from ..agent_client.resources import HostResources
from ..agent_client.sandbox import AgentSandbox
from ..egress import proxy
from ..host import cgroups, layout, run_dirs, seccomp
from ..host.instances import LiveSandboxes, machine_memory_mib, refuse
from ..host.layout import AGENT_UID, DOOR, DOOR_SOCKET, GRADER_UID, PATH, SOCKETS, WORK
from ..host.pid1 import FirstProcess
from ..snapshots import store
from . import arguments, detached, host_python, orphans, supervisor, uid_ranges
from .arguments import why_unavailable
from .supervisor import Supervisor

__all__ = ["LocalBackend", "why_unavailable"]

_MEMORY_MIB = 1024
_PIDS = 256
_DISK_MIB = 256
_ENV = {"ENVKIT_SOCKETS": SOCKETS, "HOME": WORK, "PATH": PATH, "LANG": "C.UTF-8"}
_ATTACH_S = 10.0


class LocalBackend:
    """Starts bubblewrap boxes; satisfies `envkit.protocols.SandboxBackend`.

    Used as ``async with LocalBackend() as backend``; leaving the block stops what still runs, except boxes that stay,
    and removes the snapshots. A box has ``ENVKIT_SOCKETS``, ``HOME``, ``PATH`` and ``LANG`` set, and what its spec
    names.

    Args:
        readable: Files and folders of the host that boxes see, read-only and at the same place; None takes what running
            our Python needs (`envkit.sandbox.bubblewrap.host_python.readable`), for hostile programs only its own
            modules, as it is when the backend is opened.
    """

    def __init__(self, readable: Sequence[str] | None = None) -> None:
        self._boxes = LiveSandboxes("bwrap")
        self._readable = None if readable is None else list(readable)
        self._places = (
            cgroups.find() if sys.platform == "linux" else cgroups.CgroupFolders(is_unified=False, parents={})
        )
        self._modules: Sequence[str] = ()
        self._importable: Sequence[str] = ()
        self._filter = seccomp.program()
        self._opening = b""
        self._snapshots_taken = 0
        self._is_leaving = False
        self._ranges = uid_ranges.UidRanges()

    @property
    def tells_memory_limit(self) -> bool:
        """Whether `by_agent` tells a sandbox's own memory limit from the memory of this machine."""
        return True

    def capabilities(self) -> Mapping[str, bool]:
        """Say what is enforced; without root or control groups of ours, less than all."""
        return {
            "isolation": True,
            "network": True,
            **{name: name in self._places.parents for name in cgroups.CONTROLLERS},
            "disk": True,
            "uid": os.geteuid() == 0,
            "seccomp": self._filter is not None,
        }

    def disks(self) -> Mapping[str, tuple[int, int]]:
        """Return the disks that boxes and snapshots need: MiB free, and those that must be."""
        return self._boxes.disks()

    async def start(self, spec: SandboxSpec) -> AgentSandbox:
        """Start `spec`; see `envkit.protocols.SandboxBackend.start`. Its image is a folder with a root file system."""
        return await self._start(self._boxes.new_id(), spec, spec.command)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> AgentSandbox:
        """Start `spec` with the files of `snapshot`, which this backend took; its command waits for them."""
        sandbox_id = self._boxes.new_id()
        file = store.find(self._boxes.folder / "snapshots", snapshot)
        if file is None:
            raise SandboxRefusedError(sandbox_id, f"there is no snapshot {snapshot!r}")
        box = await self._start(sandbox_id, spec, store.waiting(spec.command))
        await store.put_back(box, file, spec, _files_uid())
        return box

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return what a snapshot takes of the disk; see `envkit.protocols.SandboxBackend.snapshot_bytes`."""
        return await clock.to_thread(store.size, self._boxes.folder / "snapshots", snapshot)

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; see `envkit.protocols.SandboxBackend.remove_snapshot`."""
        await clock.to_thread(store.remove, self._boxes.folder / "snapshots", snapshot)

    async def staying(self, ledger: str | None = None) -> list[str]:
        """Return the ids of the boxes that stay on this machine, or of those of one ledger, sorted; "" is none."""
        return await clock.to_thread(detached.ids, ledger)

    async def attach(self, sandbox_id: str, *, observes: bool = False) -> AgentSandbox:
        """Return a box that stays, which this or another process started; leaving the backend leaves it running.

        With `observes` it is only looked at: the time after which it ends when it is left alone is not restarted.

        Raises:
            SandboxError: No box of this id stays on this machine.
            UnreachableError: It does not let us in.
        """
        held, first = _staying(sandbox_id, self._places)
        try:
            ours = run_dirs.connect(first.folder(DOOR), DOOR_SOCKET)
            sockets = first.folder(SOCKETS)
            disk_mib = _size_mib(first.folder(WORK))
        except OSError:
            held.let_go()
            raise SandboxError(f"box {sandbox_id!r} has just ended") from None
        except BaseException:
            held.let_go()
            raise
        box = self._box(sandbox_id, ours, held, sockets, SandboxSpec(detached=True), disk_mib)
        await box.reached(_ATTACH_S, observes=observes)
        return box

    async def dial(self, sandbox_id: str) -> socket.socket:
        """Return a connected, non-blocking stream to a box that stays, which speaks what a `AgentChannel` does.

        The caller closes it; for as long as it is open the box is not lonely. Raises as `attach`.
        """
        held, first = _staying(sandbox_id, self._places)
        try:
            return run_dirs.connect(first.folder(DOOR), DOOR_SOCKET)
        except OSError:
            raise SandboxError(f"box {sandbox_id!r} has just ended") from None
        finally:
            held.let_go()

    async def remove(self, sandbox_id: str) -> None:
        """End a box that stays, also one that does not answer; raises `SandboxError` as `attach`."""
        held, _ = _staying(sandbox_id, self._places)
        await held.kill()

    async def _start(self, sandbox_id: str, spec: SandboxSpec, command: Sequence[str]) -> AgentSandbox:
        look = self._look(spec)
        refuse(sandbox_id, spec, self.capabilities(), memory_mib=machine_memory_mib(), shown=look.readable)
        if (why := arguments.why_refused(spec)) is not None:
            raise SandboxRefusedError(sandbox_id, why)
        if (why := self._hindrance()) is not None:
            raise SandboxStartError(sandbox_id, why)
        python = arguments.python_in(look)
        if python is None:
            cause = Cause(CauseKind.IMAGE_UNUSABLE, "there is no Python 3 in it, which our agent needs")
            raise SandboxRefusedError(sandbox_id, cause)
        began = clock.now()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(theirs.close)
            try:
                if (own := await clock.to_thread(self._ranges.take)) is not None:
                    undo.callback(own.close)
                held = supervisor.launch(
                    look,
                    agent.command(python),
                    stream=theirs,
                    filter_program=self._filter,
                    group=cgroups.Cgroup(self._places, f"{self._boxes.folder.name}-{sandbox_id}"),
                    bounds=self._bounds(spec),
                    uids=own,
                )
            except OSError as error:
                raise SandboxStartError(sandbox_id, f"bubblewrap cannot be started: {error}") from None
            undo.pop_all()
        try:
            if spec.detached:
                held.group.bequeath(held.pid)
                sandbox_id, held.folder = detached.begin(held.pid)
            with anyio.move_on_after(spec.start_timeout_s) as limit:
                await held.enclose()
                await self._send_agent(ours)
            if limit.cancelled_caught:
                raise SandboxStartError(sandbox_id, f"not ready after {spec.start_timeout_s:g} s")
            sockets, holds_inodes = self._furnished(held, spec), _bounds_inodes(held, look.disk_mib)
            if spec.untrusted and not holds_inodes:
                raise SandboxRefusedError(sandbox_id, "untrusted programs are refused: not enforced here: inodes")
            box = self._box(sandbox_id, ours, held, sockets, spec, look.disk_mib)
            box.unenforced = (*box.unenforced, *(() if holds_inodes else ("inodes",)))
        except OSError as error:
            ours.close()
            cause = await held.cause(Survived())
            if held.is_running:
                cause = Cause(CauseKind.START_FAILED, f"no control group: {error}")
            await held.kill()
            raise SandboxStartError(sandbox_id, cause) from None
        except BaseException:
            ours.close()
            await held.kill()
            raise
        is_root = os.geteuid() == 0
        env = {**_ENV, **proxy.variables(spec), **spec.env}
        config = layout.config(spec, env, proxy.waiting(spec, command), has_users=is_root, is_root=is_root)
        await box.started(config, spec.start_timeout_s - (clock.now() - began))
        await proxy.open_for(box, spec, python)
        return box

    async def _send_agent(self, stream: socket.socket) -> None:
        """Send the agent in, and wait until it has said something, or ended."""
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(stream, self._opening)
        await anyio.wait_readable(stream)

    def _furnished(self, held: Supervisor, spec: SandboxSpec) -> Path:
        """Give the box's users their folders, before any program of the box runs; return that of its sockets.

        Raises:
            OSError: The box has ended.
        """
        first = held.first()
        if first is None:
            raise ProcessLookupError
        sockets = first.folder(SOCKETS)
        if os.geteuid() == 0:
            first.give(WORK, AGENT_UID)
            first.give(SOCKETS, AGENT_UID)
            first.give(GRADER_HOME, GRADER_UID)
            with suppress(OSError):  # if it is gone, the next call to it finds out
                first.bound_terminals()
        if held.folder is not None:
            detached.remember(held.folder, first.pid, held.group.name, spec.ledger)
        return sockets

    def _box(
        self, sandbox_id: str, stream: socket.socket, held: Supervisor, sockets: Path, spec: SandboxSpec, disk_mib: int
    ) -> AgentSandbox:
        channel = AgentChannel(SocketStream(stream))
        lost = {
            "network": spec.network == "open",
            "uid_range": os.geteuid() == 0 and self._ranges.why_none is not None,
            "memory_reserve": not held.holds_reserve,
        }
        hold = HostResources(
            cause=held.cause,
            kill=partial(self._end, held, spec.detached),
            let_go=held.let_go,
            sockets=sockets,
            snapshot=partial(self._keep, sandbox_id, channel, store.Extent(disk_mib, _files_uid())),
            unenforced=tuple(name for name, is_lost in lost.items() if is_lost),
            look=held.look,
            on_survived=held.group.survived,
        )
        box = AgentSandbox(sandbox_id, channel, hold, work=WORK, forget=self._boxes.forget)
        self._boxes.add(box)
        return box

    async def _end(self, held: Supervisor, detached: bool) -> None:
        if detached and self._is_leaving:
            held.let_go()
        else:
            await held.kill()

    async def _keep(self, sandbox_id: str, channel: AgentChannel, extent: store.Extent) -> str:
        self._snapshots_taken += 1
        name = f"snapshot-{self._snapshots_taken}"
        try:
            await store.keep(channel, self._boxes.folder / "snapshots" / name, extent)
        except ChannelEndedError:
            raise SandboxLostError(
                sandbox_id, Cause(CauseKind.UNKNOWN, "it ended while a snapshot was taken")
            ) from None
        return name

    def _look(self, spec: SandboxSpec) -> arguments.BwrapOptions:
        image = None if spec.image is None else Path(spec.image)
        shown: Sequence[str] | None = self._readable
        if shown is None and image is not None:
            shown = []
        elif shown is None:
            shown = self._modules if spec.untrusted else self._importable
        return arguments.BwrapOptions(
            etc=self._boxes.folder / "etc",
            disk_mib=self._disk_mib(spec),
            image=image,
            readable=shown,
            views=[(Path(source), place) for source, place in spec.views],
            is_online=spec.network == "open",
            stays=spec.detached,
        )

    def _bounds(self, spec: SandboxSpec) -> cgroups.CgroupLimits:
        holds = self._places.parents
        return cgroups.CgroupLimits(
            memory_mib=(spec.memory_mib or _MEMORY_MIB) if "memory" in holds else None,
            pids=(spec.pids or _PIDS) if "pids" in holds else None,
            cpus=spec.cpus,
        )

    def _disk_mib(self, spec: SandboxSpec) -> int:
        """What is written is memory of the box, so the two places may fill half of that."""
        if spec.disk_mib is not None:
            return spec.disk_mib
        memory_mib = self._bounds(spec).memory_mib
        return _DISK_MIB if memory_mib is None else max(min(_DISK_MIB, memory_mib // 4), 1)

    def _hindrance(self) -> str | None:
        """Return why nothing can be started here now, in one line; None where something can."""
        if shutil.which("bwrap") is None:
            return "bubblewrap is not installed (apt install bubblewrap)"
        free_mib = shutil.disk_usage(self._boxes.folder).free >> 20
        if free_mib < run_dirs.LEAST_FREE_MIB:
            return f"only {free_mib} MiB are free in {self._boxes.folder.parent}; {run_dirs.LEAST_FREE_MIB} are wanted"
        return None

    async def __aenter__(self) -> Self:
        await self._boxes.open()
        arguments.write_etc(self._boxes.folder / "etc")
        self._opening = agent.opening()
        self._modules, self._importable = host_python.standard_library(), host_python.readable()
        for group in cgroups.gone(self._places):
            await supervisor.empty(group)
        if sys.platform == "linux":
            orphans.reap()
        await clock.to_thread(self._ranges.open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_leaving = True
        self._ranges.close()
        await self._boxes.close()


def _staying(sandbox_id: str, places: cgroups.CgroupFolders) -> tuple[Supervisor, FirstProcess]:
    """Return what a box that stays hangs on, and its first process.

    Raises:
        SandboxError: There is none.
    """
    stay = detached.find(sandbox_id)
    if stay is None:
        raise SandboxError(f"there is no box {sandbox_id!r} that stays on this machine")
    try:
        first = FirstProcess(stay.first_pid)
    except OSError:
        raise SandboxError(f"box {sandbox_id!r} has just ended") from None
    return Supervisor(None, cgroups.Cgroup(places, stay.group), first=first, folder=stay.folder), first


def _bounds_inodes(held: Supervisor, disk_mib: int) -> bool:
    """Bound how many files programs can make, and say whether that worked; bubblewrap has no option for it."""
    first = held.first()
    if first is None:
        return False
    try:
        for place, size_mib in arguments.places_mib(disk_mib).items():
            first.remount(place, {"nr_inodes": str(layout.most_inodes(size_mib))})
    except OSError:
        return False
    return True


def _files_uid() -> int | None:
    """Return whose the files of a box are; None where a box has one user."""
    return AGENT_UID if os.geteuid() == 0 else None


def _size_mib(folder: Path) -> int:
    """Return how much fits into a place that a box can write to."""
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize >> 20
