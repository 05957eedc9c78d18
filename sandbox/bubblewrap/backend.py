"""The bubblewrap backend: isolates sandboxes with Linux namespaces, and starts them in milliseconds without a daemon.

Related modules: `envkit.sandbox.bubblewrap.arguments` (files that a sandbox sees and can write),
`envkit.sandbox.host.cgroups` (limits) and `envkit.sandbox.host.seccomp` (filter). Unless its spec opens the network, a
sandbox has only a loopback interface. Process 1 is envkit's agent. If this process is root, the agent can start
programs as uid 1000 and graders as uid 1001, both without capabilities. A sandbox that is not detached ends when its
channel is closed or this process ends.

If this process is root, each sandbox has a separate range of host uids (`envkit.sandbox.bubblewrap.uid_ranges`). The
kernel's per-user limits (inotify instances, queued signals, pipe memory) then apply to each sandbox separately. If the
machine does not allow user namespaces, all sandboxes and the host's uid 1000 share these limits, and `unenforced`
contains ``uid_range``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import anyio

from envkit import clock
from envkit.errors import SandboxError, SandboxRefusedError, SandboxStartError
from envkit.protocols import SandboxBackend
from envkit.types import GRADER_HOME, Cause, CauseKind, SandboxSpec
from envkit.types.sandboxes import SandboxLimits

from .. import agent
from ..agent_client.channel import AgentChannel, SocketStream, Survived
from ..agent_client.sandbox import AgentSandbox
from ..agent_client.teardown import HostResources
from ..egress import proxy
from ..host import cgroups, layout, run_dirs, seccomp
from ..host.instances import LiveSandboxes, machine_memory_mib, refuse
from ..host.layout import AGENT_UID, CONTROL_DIR, CONTROL_SOCKET, GRADER_UID, PATH, SOCKETS, WORK
from ..host.pid1 import FirstProcess
from ..snapshots import store
from . import arguments, detached, host_python, supervisor, uid_ranges
from .arguments import why_unavailable
from .supervisor import Supervisor

__all__ = ["LocalBackend", "why_unavailable"]

_ENV = {"ENVKIT_SOCKETS": SOCKETS, "HOME": WORK, "PATH": PATH, "LANG": "C.UTF-8"}
_ATTACH_S = 10.0


class LocalBackend(SandboxBackend):
    """Starts bubblewrap sandboxes; implements `envkit.protocols.SandboxBackend`.

    Use it as ``async with LocalBackend() as backend``. Leaving the block removes the snapshots, and stops all sandboxes
    except detached ones. Programs in a sandbox have the environment variables ``ENVKIT_SOCKETS``, ``HOME``, ``PATH``,
    ``LANG`` and those of the spec.

    Args:
        readable: Host paths that sandboxes see read-only. By default, these are the paths that the host's Python needs
            (see `host_python`). With this default, a sandbox with an untrusted spec sees only Python's own modules, and
            a sandbox with an image sees no host paths.
        may_lack: Limits that are dropped from specs if this machine cannot enforce them, instead of refusing the spec:
            names of `capabilities`, and ``"inodes"``.
    """

    distinguishes_memory_limit = True

    def __init__(self, readable: Sequence[str] | None = None, *, may_lack: Collection[str] = ()) -> None:
        self._may_lack = may_lack
        self._sandboxes = LiveSandboxes("bwrap")
        self._readable = None if readable is None else list(readable)
        self._cgroup_parents = cgroups.find()
        self._modules: Sequence[str] = ()
        self._importable: Sequence[str] = ()
        self._filter = seccomp.program()
        self._opening = b""
        self._snapshots = store.SnapshotStore(self._sandboxes)
        self._is_leaving = False
        self._ranges = uid_ranges.UidRanges()

    def capabilities(self) -> Mapping[str, bool]:
        """Return, by kind of limit, whether it is enforced on this machine; some need root or writable cgroups."""
        return {
            "isolation": True,
            "network": True,
            **{name: name in self._cgroup_parents.parents for name in cgroups.CONTROLLERS},
            "disk": True,
            "uid": os.geteuid() == 0,
            "seccomp": self._filter is not None,
        }

    def disks(self) -> Mapping[str, tuple[int, int]]:
        """Return, for each disk that sandboxes use, its free MiB and the MiB that must stay free."""
        return self._sandboxes.disks()

    async def start(self, spec: SandboxSpec) -> AgentSandbox:
        """Start a sandbox; see `envkit.protocols.SandboxBackend.start`. `spec.image` is a folder of the host."""
        return await self._start(self._sandboxes.new_id(), spec, spec.command)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> AgentSandbox:
        """Start a sandbox with the files of `snapshot`; its command starts after the files are restored."""
        sandbox_id = self._sandboxes.new_id()
        folder = self._snapshots.find(snapshot)
        if folder is None:
            raise SandboxRefusedError(sandbox_id, f"there is no snapshot {snapshot!r}")
        sandbox = await self._start(sandbox_id, spec, store.waiting(spec.command))
        await store.restore(sandbox, folder, spec)
        return sandbox

    async def snapshot_bytes(self, snapshot: str) -> int:
        return await self._snapshots.size(snapshot)

    async def remove_snapshot(self, snapshot: str) -> None:
        await self._snapshots.remove(snapshot)

    async def list_detached(self, ledger: str | None = None) -> list[str]:
        """Return the sorted ids of the detached sandboxes that the ledger with the id `ledger` records.

        If `ledger` is empty, return those that no ledger records; if it is None, return all detached sandboxes.
        """
        return await clock.to_thread(detached.ids, ledger)

    async def attach(self, sandbox_id: str, *, as_observer: bool = False) -> AgentSandbox:
        """Connect to a detached sandbox that any process of our user started. Closing this backend does not stop it.

        Args:
            sandbox_id: Id of the sandbox.
            as_observer: If True, the connection does not count as a client, so the sandbox's orphan timeout keeps
                running.

        Raises:
            SandboxError: No detached sandbox on this machine has this id.
            UnreachableError: The sandbox does not reply.
        """
        supervised, first = _find_detached(sandbox_id, self._cgroup_parents)
        try:
            sockets = first.folder(SOCKETS)
            size = os.statvfs(first.folder(WORK))
            disk_mib = size.f_blocks * size.f_frsize >> 20
            # Connect last, so that no socket stays open if a folder is missing because the sandbox has just ended.
            ours = run_dirs.connect(first.folder(CONTROL_DIR), CONTROL_SOCKET)
        except OSError:
            supervised.release()
            raise SandboxError(f"sandbox {sandbox_id!r} has just ended") from None
        except BaseException:
            supervised.release()
            raise
        sandbox = self._sandbox(
            sandbox_id, await SocketStream.open(ours), supervised, sockets, SandboxSpec(detached=True), disk_mib
        )
        await sandbox.reached(_ATTACH_S, as_observer=as_observer)
        return sandbox

    async def remove(self, sandbox_id: str) -> None:
        """End a detached sandbox, even if it is unresponsive. Raises `SandboxError` if there is no such sandbox."""
        supervised, _ = _find_detached(sandbox_id, self._cgroup_parents)
        await supervised.kill()

    async def _start(self, sandbox_id: str, spec: SandboxSpec, command: Sequence[str]) -> AgentSandbox:
        options, capabilities = self._options(spec), self.capabilities()
        dropped = [name for name in self._may_lack if not capabilities.get(name, True)]
        spec = replace(
            spec,
            memory_mib=None if "memory" in dropped else spec.memory_mib,
            pids=None if "pids" in dropped else spec.pids,
            cpus=None if "cpu" in dropped else spec.cpus,
        )
        required = {name: holds for name, holds in capabilities.items() if name not in dropped}
        refuse(sandbox_id, spec, required, memory_mib=machine_memory_mib(), shown=options.readable)
        if (why := arguments.why_refused(spec)) is not None:
            raise SandboxRefusedError(sandbox_id, why)
        if (why := self._why_not_now()) is not None:
            raise SandboxStartError(sandbox_id, why)
        python = arguments.python_in(options)
        if python is None:
            cause = Cause(CauseKind.IMAGE_UNUSABLE, "the image has no Python 3, which the agent needs")
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
                supervised = supervisor.launch(
                    options,
                    agent.command(python),
                    stream=theirs,
                    filter_program=self._filter,
                    group=cgroups.Cgroup(self._cgroup_parents, f"{self._sandboxes.folder.name}-{sandbox_id}"),
                    limits=SandboxLimits.of(spec),
                    uids=own,
                )
            except OSError as error:
                raise SandboxStartError(sandbox_id, f"bubblewrap cannot be started: {error}") from None
            undo.pop_all()
        try:
            if spec.detached:
                supervised.group.transfer_to(supervised.pid)
                sandbox_id, supervised.folder = detached.begin(supervised.pid)
            with anyio.move_on_after(spec.start_timeout_s) as limit:
                first = await supervised.enclose()
                with suppress(ConnectionError):
                    await asyncio.get_running_loop().sock_sendall(ours, self._opening)
                await anyio.wait_readable(ours)  # until the agent replies or ends
            if limit.cancelled_caught:
                raise SandboxStartError(sandbox_id, f"not ready after {spec.start_timeout_s:g} s")
            sockets, has_inode_limit = _prepare(first, supervised, spec), _limit_inodes(first, options.disk_mib)
            if spec.untrusted and not has_inode_limit and "inodes" not in self._may_lack:
                raise SandboxRefusedError(sandbox_id, "untrusted programs are refused: this host cannot limit inodes")
            sandbox = self._sandbox(
                sandbox_id, await SocketStream.open(ours), supervised, sockets, spec, options.disk_mib
            )
            sandbox.unenforced = (*sandbox.unenforced, *(() if has_inode_limit else ("inodes",)))
        except OSError as error:
            ours.close()
            cause = await supervised.cause(Survived())
            if supervised.is_running:
                cause = Cause(CauseKind.START_FAILED, f"the cgroup cannot be created: {error}")
            await supervised.kill()
            raise SandboxStartError(sandbox_id, cause) from None
        except BaseException:
            ours.close()
            await supervised.kill()
            raise
        is_root = os.geteuid() == 0
        env = {**_ENV, **proxy.variables(spec), **spec.env}
        config = layout.config(spec, env, proxy.waiting(spec, command), has_users=is_root, is_root=is_root)
        await sandbox.started(config, spec.start_timeout_s - (clock.now() - began))
        await proxy.open_for(sandbox, spec, python)
        return sandbox

    def _sandbox(
        self,
        sandbox_id: str,
        stream: SocketStream,
        supervised: Supervisor,
        sockets: Path,
        spec: SandboxSpec,
        disk_mib: int,
    ) -> AgentSandbox:
        is_unenforced = {
            "network": spec.network == "open",
            "uid_range": os.geteuid() == 0 and self._ranges.why_none is not None,
            "memory_reserve": not supervised.holds_reserve,
        }
        resources = HostResources(
            cause=supervised.cause,
            kill=partial(self._end, supervised, spec.detached),
            release_resources=supervised.release,
            sockets=sockets,
            snapshot=lambda: self._snapshots.take(sandbox, disk_mib),
            unenforced=tuple(name for name, holds in is_unenforced.items() if holds),
            diagnose=supervised.diagnose,
            on_survived=supervised.group.survived,
        )
        sandbox = AgentSandbox(sandbox_id, AgentChannel(stream), resources, work=WORK, forget=self._sandboxes.forget)
        self._sandboxes.add(sandbox)
        return sandbox

    async def _end(self, supervised: Supervisor, detached: bool) -> None:
        if detached and self._is_leaving:
            supervised.release()
        else:
            await supervised.kill()

    def _options(self, spec: SandboxSpec) -> arguments.BwrapOptions:
        image = None if spec.image is None else Path(spec.image)
        shown: Sequence[str] | None = self._readable
        if shown is None and image is not None:
            shown = []
        elif shown is None:
            shown = self._modules if spec.untrusted else self._importable
        return arguments.BwrapOptions(
            etc=self._sandboxes.folder / "etc",
            disk_mib=SandboxLimits.of(spec).disk_mib,
            image=image,
            readable=shown,
            views=[(Path(source), path) for source, path in spec.views],
            is_online=spec.network == "open",
            is_detached=spec.detached,
        )

    def _why_not_now(self) -> str | None:
        """Return one line that says why no sandbox can be started now; None if one can be started."""
        if shutil.which("bwrap") is None:
            return "bubblewrap is not installed (apt install bubblewrap)"
        try:
            run_dirs.require_space(self._sandboxes.folder)
        except OSError as error:
            return f"{self._sandboxes.folder.parent}: {error.strerror}"
        return None

    async def __aenter__(self) -> Self:
        await self._sandboxes.open()
        arguments.write_etc(self._sandboxes.folder / "etc")
        self._opening = agent.opening()
        self._modules, self._importable = host_python.standard_library(), host_python.readable()
        for group in cgroups.gone(self._cgroup_parents):
            await supervisor.empty(group)
        supervisor.reap_orphans()
        self._ranges.why_none = await clock.to_thread(uid_ranges.why_unavailable)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_leaving = True
        self._ranges.close()
        await self._sandboxes.close()


def _find_detached(sandbox_id: str, parents: cgroups.CgroupFolders) -> tuple[Supervisor, FirstProcess]:
    """Return a supervisor for a running detached sandbox, and the sandbox's process 1.

    Raises:
        SandboxError: There is no such sandbox.
    """
    note = detached.find(sandbox_id)
    if note is None:
        raise SandboxError(f"there is no detached sandbox {sandbox_id!r} on this machine")
    try:
        first = FirstProcess(note.first_pid)
    except OSError:
        raise SandboxError(f"sandbox {sandbox_id!r} has just ended") from None
    return Supervisor(None, cgroups.Cgroup(parents, note.group), known_first=first, folder=note.folder), first


def _prepare(first: FirstProcess, supervised: Supervisor, spec: SandboxSpec) -> Path:
    """Give the agent and the grader their folders, before any program runs; return the folder of the sockets.

    Raises:
        OSError: The sandbox has ended.
    """
    sockets = first.folder(SOCKETS)
    if os.geteuid() == 0:
        first.chown(WORK, AGENT_UID)
        first.chown(SOCKETS, AGENT_UID)
        first.chown(GRADER_HOME, GRADER_UID)
        with suppress(OSError):
            # Ignore errors: if process 1 has exited, the first call to the agent will report it.
            first.limit_terminals()
    if supervised.folder is not None:
        detached.record(supervised.folder, first.pid, supervised.group.name, spec.ledger)
    return sockets


def _limit_inodes(first: FirstProcess, disk_mib: int) -> bool:
    """Remount writable paths to limit the number of files, which bubblewrap cannot do; return whether that worked."""
    try:
        for path, size_mib in arguments.writable_mib(disk_mib).items():
            first.remount(path, {"nr_inodes": str(layout.max_inodes(size_mib))})
    except OSError:
        return False
    return True
