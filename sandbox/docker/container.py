"""Start Docker containers with attached streams, apply limits to them from the host, and find out why they ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from envkit import clock
from envkit.errors import SandboxError
from envkit.types import JSON, Cause, CauseKind, SandboxSpec
from envkit.types.sandboxes import Blocked, SandboxLimits

from ..agent_client.channel import Survived
from ..host import agent_cgroup, run_dirs
from ..host.agent_cgroup import AgentCgroup
from ..host.layout import CONTROL_DIR, CONTROL_SOCKET, SHARED_PER_UID, SOCKETS
from ..host.pid1 import FirstProcess
from . import container_config
from .api import LATE_EVENT_S, Daemon, DaemonError
from .attach_stream import AttachStream

_CAUSE_S = 2.0
_STDERR_S = 0.5
_LINE_CHARACTERS = 300
_TTY_GROUP = "5"
"""Group id of the terminals in Docker's containers."""
NOT_REACHABLE = "detached sandboxes need root on the daemon's machine"


class MissingProgramError(Exception):
    """The image does not contain the program that the container runs."""


@dataclass(frozen=True, slots=True)
class DiskPaths:
    """Where a container writes on this host's disk: its changed files, its volumes and its ``/etc/hosts``."""

    folders: tuple[Path, ...]
    first_pid: int


@dataclass(eq=False)
class AttachedContainer:
    """A container that runs or is starting, with its standard streams attached.

    Attributes:
        id: Docker's id of the container.
        stream: The container's standard streams.
        removes_itself: Whether the daemon removes the container when it ends.
        agent_group: The separate memory cgroup of the agent's programs; None if they share the container's cgroup.
    """

    daemon: Daemon
    id: str
    stream: AttachStream
    removes_itself: bool
    agent_group: AgentCgroup | None = None

    def __post_init__(self) -> None:
        self._began_s = int(clock.wall())

    async def kill(self) -> None:
        """Kill and remove the container; may be called repeatedly.

        Raises:
            DaemonError: The daemon does not answer.
        """
        self.stream.close()
        await self.daemon.remove(self.id)

    async def places(self, spec: SandboxSpec) -> tuple[Mapping[str, Path], FirstProcess | None, DiskPaths | None]:
        """Return what this process can reach of the container on this host.

        Returns:
            The host path of each tmpfs volume, by its path in the container; process 1, which the caller closes, if
            this host has a process with its pid and its mounts; and where the container writes on this host's disk,
            unless its root is read-only or inaccessible.
        """
        if not _is_open(self.daemon):
            return {}, None, None
        found = await self.daemon.inspect(self.id) or {"State": {"Pid": 0}}
        mounts, pid = found.get("Mounts", ()), int(found["State"]["Pid"])
        # `ismount` does not block
        volumes = {one["Destination"]: Path(one["Source"]) for one in mounts if os.path.ismount(one["Source"])}  # noqa: ASYNC240
        disk = None
        layer = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir") or ""
        if spec.profile == "system" and os.access(layer, os.R_OK):
            on_disk = [Path(one["Source"]) for one in mounts if one["Type"] == "volume"]
            # Docker stores the container's /etc/hosts and other files in the last of these folders.
            folders = [folder for folder in on_disk if folder not in volumes.values()]
            disk = DiskPaths((Path(layer), *folders, Path(found["HostsPath"]).parent), pid)
        return volumes, _first_process(pid, volumes), disk

    async def apply_limits(self, first: FirstProcess | None, spec: SandboxSpec) -> None:
        """Apply the limits for which Docker has no option, if this process has the rights; close `first`."""
        if first is not None:
            with closing(first):
                with suppress(OSError):
                    first.limit_terminals({"gid": _TTY_GROUP})
                if lends_score(self.daemon, spec):
                    await clock.to_thread(self._lend, first, SandboxLimits.of(spec).memory_mib)

    def find_agent_group(self, first: FirstProcess | None) -> None:
        """Set `agent_group` for a container that another process has started; close `first`."""
        if first is not None:
            with closing(first):
                group = agent_cgroup.of_container(self.id, first.pid)
                self.agent_group = group if group is not None and group.exists else None

    def _lend(self, first: FirstProcess, memory_mib: int) -> None:
        """Allow process 1 to set OOM scores, and create a memory cgroup for the agent's programs."""
        lent: dict[str, str] = {}
        group = agent_cgroup.of_container(self.id, first.pid)
        if group is not None:
            with suppress(OSError):
                group.make(memory_mib)
                lent[str(group.join_file)] = agent_cgroup.INSIDE
        try:
            first.lend(lent)
        except OSError:
            if group is not None:
                group.remove()
        else:
            self.agent_group = group if lent else None

    async def diagnose(self) -> Blocked:
        """Return why the sandbox does not answer; see `envkit.sandbox.pool.health.Diagnosable`.

        Raises:
            DaemonError: The daemon does not answer.
        """
        found = await self.daemon.inspect(self.id)
        if found is not None and found["State"].get("Paused"):
            return Blocked.PAUSED
        used, limit = await self.daemon.processes(self.id)
        return Blocked.PROCESS_LIMIT if limit and used >= limit * 3 // 4 else Blocked.UNKNOWN

    async def cause(self, survived: Survived) -> Cause:
        """Return why the container ended, within 2.5 s. `survived` counts the OOM kills that did not kill process 1."""
        stderr = b""
        with anyio.move_on_after(_STDERR_S):
            stderr = await self.stream.last_stderr()
        lines = stderr.decode(errors="replace").strip().splitlines() or [""]
        with anyio.move_on_after(_CAUSE_S):
            while True:
                try:
                    why = await self._cause(lines[-1][-_LINE_CHARACTERS:], survived)
                except DaemonError as error:
                    return Cause(CauseKind.BACKEND_LOST, str(error))
                if why is not None:
                    return why
                await anyio.sleep(0.02)  # the daemon records the exit slightly after the streams end
        return Cause(CauseKind.BACKEND_LOST, "its streams ended")

    async def _cause(self, last_line: str, survived: Survived) -> Cause | None:
        found = await self.daemon.inspect(self.id)
        out_of_memory = Cause(CauseKind.OUT_OF_MEMORY, "out of memory", by_agent=self.daemon.distinguishes_memory_limit)
        why: Cause | None = Cause(CauseKind.BACKEND_LOST, "removed")
        if found is not None:
            assumed = None if survived.oom_kills else out_of_memory
            why = container_config.cause(found["State"], last_line, out_of_memory=assumed)
            if why is None or why.kind is not CauseKind.KILLED:
                return why
        since_s = survived.at_s + LATE_EVENT_S if survived.oom_kills else self._began_s
        is_out_of_memory, code = await self.daemon.end_since(self.id, since_s)
        if is_out_of_memory:
            return out_of_memory
        if found is None and self.removes_itself and code is not None:
            return container_config.cause({"ExitCode": code}, last_line)
        return why


def _first_process(pid: int, volumes: Mapping[str, Path]) -> FirstProcess | None:
    try:
        first = FirstProcess(pid)
    except OSError:
        return None
    with suppress(OSError, KeyError):
        if first.folder(SOCKETS).samefile(volumes[SOCKETS]):
            return first
    first.close()
    return None


def lends_score(daemon: Daemon, spec: SandboxSpec) -> bool:
    """Whether envkit, as root on the daemon's machine, allows process 1 of a sandbox to change OOM scores."""
    return _is_open(daemon) and spec.profile == "strict" and spec.runtime is None


def shared(daemon: Daemon) -> tuple[str, ...]:
    """Return the names of kernel resources that sandboxes share with each other and the host's uids 1000 and 1001."""
    return SHARED_PER_UID if _is_open(daemon) else (*SHARED_PER_UID, "terminals")


def _is_open(daemon: Daemon) -> bool:
    """Whether this process is root on the daemon's machine, as far as it can know."""
    return daemon.is_near and os.geteuid() == 0


def connect(volumes: Mapping[str, Path]) -> socket.socket:
    """Return a non-blocking socket connected to the agent of the detached sandbox with these volumes.

    Raises:
        SandboxError: This process cannot access the volumes.
        UnreachableError: The agent does not listen.
    """
    if CONTROL_DIR not in volumes:
        raise SandboxError(NOT_REACHABLE)
    return run_dirs.connect(volumes[CONTROL_DIR], CONTROL_SOCKET)


async def run(daemon: Daemon, options: Mapping[str, JSON], opening: bytes, removes_itself: bool) -> AttachedContainer:
    """Create a container, attach to it, write `opening` to its standard input and start it.

    Raises:
        MissingProgramError: The image does not contain the container's program.
        DaemonError: The daemon cannot create or start the container for another reason.
    """
    container_id = await daemon.create(options)
    stream: AttachStream | None = None
    try:
        stream = await daemon.attach(container_id)
        attached = AttachedContainer(daemon, container_id, stream, removes_itself)
        await stream.send(opening)  # returns before the container reads the bytes
        await daemon.start(container_id)
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            if stream is not None:
                stream.close()
            await daemon.remove(container_id)
        program = options["Entrypoint"]
        missing = f'exec: "{program[0]}"' if isinstance(program, list) else str(program)
        if isinstance(error, DaemonError) and missing in str(error):  # library's message: Docker
            raise MissingProgramError from None
        raise
    return attached
