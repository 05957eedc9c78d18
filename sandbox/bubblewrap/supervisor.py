"""Starts, inspects and ends a bubblewrap sandbox from the host: its processes, cgroup, uid range and folder."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import anyio

from envkit import clock
from envkit.runs import owners
from envkit.types import Cause, CauseKind
from envkit.types.sandboxes import Blocked, SandboxLimits

from ..agent_client.channel import Survived
from ..host import cgroups, run_dirs
from ..host.child_process import Child, cause_of
from ..host.pid1 import FirstProcess
from .arguments import BwrapOptions, bwrap_arguments
from .uid_ranges import UidRange

_CAUSE_S = 2.0
_GRACE_S = 2.0
"""Seconds that bubblewrap may take to exit after process 1 of the sandbox was killed."""
_EMPTY_S = 2.0
"""Seconds that killed processes may take to leave the cgroup."""
_OOM_SCORE = 500
"""OOM score (of 1,000) of a sandbox's processes, which makes the kernel kill them before the host's processes."""


@dataclass(eq=False)
class Supervisor:
    """The handle with which the host inspects and ends one sandbox.

    Attributes:
        child: The bubblewrap process; None if this process did not start it.
        group: Cgroup of all processes of the sandbox.
        info: Pipe from which to read the pid of process 1; None once it is read.
        known_first: Process 1; None until its pid is read.
        folder: Folder to remove when the sandbox ends; None for no folder.
        score_line: Socket over which to lend files to process 1.
        uids: The uid range of the sandbox, to recycle at its end.
        holds_reserve: Whether the agent user's programs have a lower memory limit than the whole sandbox, so that
            memory is reserved for graders.
    """

    child: Child | None
    group: cgroups.Cgroup
    _: KW_ONLY
    info: int | None = None
    known_first: FirstProcess | None = None
    folder: Path | None = None
    score_line: socket.socket | None = None
    uids: UidRange | None = None
    _info_json: bytes = b""
    _memory: cgroups.MemoryCounters | None = None

    def __post_init__(self) -> None:
        self.holds_reserve = self.group.of_agent is not None and self.group.of_agent.exists

    def first(self) -> FirstProcess | None:
        """Return process 1 of the sandbox; None until bubblewrap reports its pid, and if it has exited by then."""
        while self.known_first is None and self.info is not None:
            os.set_blocking(self.info, False)
            try:
                chunk = os.read(self.info, 4096)
            except BlockingIOError:
                return None
            self._info_json += chunk
            if not chunk or b"}" in self._info_json:  # the JSON object is complete
                os.close(self.info)
                self.info = None
                with suppress(ValueError, KeyError, ProcessLookupError):
                    self.known_first = FirstProcess(json.loads(self._info_json)["child-pid"])
        return self.known_first

    @property
    def is_running(self) -> bool:
        """Whether the bubblewrap process still runs; False if this process did not start it."""
        return self.child is not None and self.child.returncode is None

    @property
    def pid(self) -> int:
        """Pid of the bubblewrap process, which this process must have started."""
        assert self.child is not None
        return self.child.pid

    async def enclose(self) -> FirstProcess:
        """Move the sandbox's processes into its cgroup, and return process 1.

        Must be called before the agent receives its configuration.

        Takes several milliseconds, during which the agent's Python starts.

        Raises:
            OSError: The kernel refuses to move a process, or the sandbox has ended.
        """
        while (first := self.first()) is None:
            if self.info is None:
                raise ProcessLookupError
            await anyio.wait_readable(self.info)
        await clock.to_thread(self._join, (self.pid, first.pid))
        return first

    async def cause(self, survived: Survived) -> Cause:
        """Wait at most 2 s for the sandbox's end; return its cause. `survived` counts OOM kills that did not end it."""
        with anyio.move_on_after(_CAUSE_S):
            await self._wait()
        if self.child is None:
            return Cause(CauseKind.UNKNOWN, "its processes have ended")
        code = self.child.returncode
        found = (self._memory or self.group.memory_counters()).cause(survived.oom_kills)
        if code == 128 + signal.SIGKILL and found is not None:
            return found
        return cause_of(code, self.child.last_line())

    async def diagnose(self) -> Blocked:
        """Return why the sandbox does not answer; see `envkit.sandbox.pool.health.Diagnosable`."""
        first = self.first()
        if first is not None and first.is_stopped:
            return Blocked.PAUSED
        return Blocked.PROCESS_LIMIT if self.group.is_full_of_processes() else Blocked.UNKNOWN

    async def kill(self) -> None:
        """Kill the sandbox and remove its cgroup and folder; takes at most some seconds.

        Cancellation of the calling task does not interrupt this method. A repeated call does nothing.
        """
        with anyio.CancelScope(shield=True):
            if (first := self.first()) is not None:
                first.kill()
            elif self.child is not None:
                self.child.kill()
            if self.child is not None:
                await self.child.end(grace_s=_GRACE_S)
            else:
                with anyio.move_on_after(_GRACE_S):
                    await self._wait()
            # Read the memory counters now, because `empty` removes them with the cgroup.
            self._memory = self._memory or self.group.memory_counters()
            if await empty(self.group) and self.uids is not None:
                self.uids.recycle()
                self.uids = None
            self.release()
            if self.folder is not None:
                await clock.to_thread(run_dirs.remove, self.folder)

    def release(self) -> None:
        """Close this process's descriptors without ending the sandbox; a repeated call does nothing."""
        if self.known_first is not None:
            self.known_first.close()
        if self.info is not None:
            os.close(self.info)
            self.info = None
        if self.score_line is not None:
            self.score_line.close()
        if self.uids is not None:
            self.uids.close()
            self.uids = None

    async def _wait(self) -> None:
        if self.child is not None:
            await self.child.wait()
        elif self.known_first is not None:
            await self.known_first.wait()

    def _join(self, pids: Sequence[int]) -> None:
        for pid in pids:
            self.group.join(pid)
            with suppress(OSError):
                Path(f"/proc/{pid}/oom_score_adj").write_text(str(_OOM_SCORE))
        if self.score_line is not None:
            self._lend(pids[-1], self.score_line)

    def _lend(self, pid: int, line: socket.socket) -> None:
        """Send process 1 writable descriptors of its OOM score and of the agent user's cgroup.

        Process 1 cannot open these files for writing by itself, because they are read-only in the sandbox.
        """
        wanted = {b"s": (Path(f"/proc/{pid}/oom_score_adj"), os.O_RDWR)}
        if self.holds_reserve and self.group.of_agent is not None:
            wanted[b"g"] = self.group.of_agent.join_file, os.O_WRONLY
        with line, ExitStack() as opened:
            lent: dict[bytes, int] = {}
            for name, (path, flags) in wanted.items():
                with suppress(OSError):
                    lent[name] = os.open(path, flags | os.O_CLOEXEC)
                    opened.callback(os.close, lent[name])
            self.holds_reserve = b"g" in lent
            with suppress(OSError):
                socket.send_fds(line, [b"".join(lent) or b"-"], list(lent.values()))


async def empty(group: cgroups.Cgroup) -> bool:
    """Kill all processes in a cgroup and remove the cgroup; give up after 2 s and return False."""
    with anyio.move_on_after(_EMPTY_S):
        while not group.remove():
            group.kill()
            await anyio.sleep(0.005)
        return True
    return False


def launch(
    options: BwrapOptions,
    command: Sequence[str],
    *,
    stream: socket.socket,
    filter_program: bytes | None,
    group: cgroups.Cgroup,
    limits: SandboxLimits,
    uids: UidRange | None = None,
) -> Supervisor:
    """Create a cgroup and start bubblewrap in it.

    Bubblewrap reads its options from a file, because other users could read them on the command line.

    Args:
        options: Mount and namespace options; this function adds mounts of the cgroup's files.
        command: The command that bubblewrap runs.
        stream: Becomes the command's standard input and output; closed in this process.
        filter_program: The seccomp filter; None for no filter.
        group: The cgroup to create.
        limits: Limits of the cgroup.
        uids: The uid range of the sandbox; None to run bubblewrap in this process's user namespace.

    Raises:
        OSError: Bubblewrap is not installed, or the kernel refuses the cgroup; the caller must then close `uids`.
    """
    seen = replace(options, views=(*options.views, *group.views()))
    with ExitStack() as undo, ExitStack() as lent:
        info, info_writer = os.pipe()
        undo.callback(os.close, info)
        lent.callback(os.close, info_writer)
        arguments = _file_of(b"\0".join(os.fsencode(option) for option in bwrap_arguments(seen)))
        lent.callback(os.close, arguments)
        filtering = _file_of(filter_program or b"")
        lent.callback(os.close, filtering)
        score_line, its_end = socket.socketpair()
        undo.callback(score_line.close)
        lent.callback(its_end.close)
        handles = [arguments, info_writer, filtering, its_end.fileno()]
        argv = ["bwrap", "--args", str(arguments), "--info-fd", str(info_writer)]
        if filter_program is not None:
            argv += ["--seccomp", str(filtering)]
        if uids is not None:
            argv += ["--userns", str(uids.namespace)]
            handles += [uids.namespace, uids.lock.fileno()]
        argv += ["--", *command, str(its_end.fileno())]
        undo.callback(group.remove)
        group.make(limits)
        # Start bubblewrap with an empty environment, because programs in the sandbox can read its environment.
        child = Child(argv, env={}, stream=stream, name=group.name, pass_fds=handles)
        undo.pop_all()
    return Supervisor(child, group, info=info, score_line=score_line, uids=uids)


def find_orphans() -> list[int]:
    """Return the pids of children of bubblewrap processes that were killed while they started a sandbox.

    Bubblewrap forks the child that becomes the sandbox, and the child waits on a pipe before it sets its parent-death
    signal. If bubblewrap is killed during this time, the child waits forever, without a cgroup or a run directory. We
    start bubblewrap with the name of the sandbox's cgroup as argv[0]; the child has the same argv[0].

    An orphan's argv[0] names its envkit process, and an orphan is not a session leader. A running sandbox does not
    match: its agent has another argv[0]. Bubblewrap's first process does not match: it is a session leader.
    """
    return [pid for pid, name in _named() if owners.is_owner_gone(name) and _is_led(pid)]


def reap_orphans() -> list[int]:
    """Kill the orphans and return their pids."""
    found = find_orphans()
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _named() -> Iterator[tuple[int, str]]:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                name = (process / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
                if name.startswith("envkit-") and process.stat().st_uid == os.geteuid():
                    yield int(process.name), name


def _is_led(pid: int) -> bool:
    try:
        return os.getsid(pid) != pid
    except ProcessLookupError:
        return False


def _file_of(content: bytes) -> int:
    """Create an in-memory file with `content`; return a descriptor that reads from the start of the file."""
    handle = os.memfd_create("bwrap")
    os.write(handle, content)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle
