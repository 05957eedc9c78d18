"""What a bubblewrap box hangs on while it lives, and what must be gone when it does not: processes, group, folder."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import anyio

from envkit import clock
from envkit.types import Cause, CauseKind

from ..agent_client.channel import Survived
from ..host import cgroups, run_dirs
from ..host.child_process import Child, cause_of, signal_in
from ..host.pid1 import FirstProcess
from .arguments import BwrapOptions, options
from .uid_ranges import UidRange

_CAUSE_S = 2.0
_GRACE_S = 2.0
"""Seconds until bubblewrap, which waits for its first process, must have ended after that was killed."""
_EMPTY_S = 2.0
"""Seconds until everybody who was killed must have left the group."""
_VICTIM = 500
"""How much sooner than others a box's programs die when the whole machine is out of memory, of 1,000."""


class Supervisor:
    """The processes of one box on the host.

    Args:
        child: Bubblewrap; None where another process of ours started it.
        group: Control group of all that runs in it.
        told: Pipe on which bubblewrap says what the first process is.
        first: The first process, where that is known.
        score_line: Socket whose other end the first process has, for the files that it is lent.
        uids: The range of uids that it has for itself.

    Attributes:
        group: The group.
        folder: What is removed with it; None for nothing.
        holds_reserve: Whether the agent's programs have a memory limit of their own.
    """

    def __init__(
        self,
        child: Child | None,
        group: cgroups.Cgroup,
        *,
        told: int | None = None,
        first: FirstProcess | None = None,
        folder: Path | None = None,
        score_line: socket.socket | None = None,
        uids: UidRange | None = None,
    ) -> None:
        self._child = child
        self.group = group
        self.folder = folder
        self._told = told
        self._said = b""
        self._first = first
        self._memory: cgroups.MemoryCounters | None = None
        self._score_line = score_line
        self._uids = uids
        self.holds_reserve = group.of_agent is not None and group.of_agent.exists

    def first(self) -> FirstProcess | None:
        """The box's first process; None until bubblewrap has said which it is, or when that has ended."""
        while self._first is None and self._told is not None:
            os.set_blocking(self._told, False)
            try:
                piece = os.read(self._told, 4096)
            except BlockingIOError:
                return None
            self._said += piece
            if not piece or b"}" in self._said:  # it says it in several pieces
                os.close(self._told)
                self._told = None
                with suppress(ValueError, KeyError, ProcessLookupError):
                    self._first = FirstProcess(json.loads(self._said)["child-pid"])
        return self._first

    @property
    def is_running(self) -> bool:
        """Whether what we started has not ended."""
        return self._child is not None and self._child.returncode is None

    @property
    def pid(self) -> int:
        """Number of the process that the box's life hangs on, where we started it."""
        assert self._child is not None
        return self._child.pid

    async def enclose(self) -> None:
        """Put the box into its group, which must happen before it is told to run anything.

        The kernel takes several milliseconds for that, in which the agent's Python starts.

        Raises:
            OSError: The kernel refuses, or the box has ended.
        """
        while (first := self.first()) is None:
            if self._told is None:
                raise ProcessLookupError
            await anyio.wait_readable(self._told)
        await clock.to_thread(self._join, (self.pid, first.pid))

    async def cause(self, survived: Survived) -> Cause:
        """Say why the box is gone; waits for at most 2 s."""
        with anyio.move_on_after(_CAUSE_S):
            await self._wait()
        if self._child is None:
            return Cause(CauseKind.UNKNOWN, "its processes have ended")
        code = self._child.returncode
        found = (self._memory or self.group.memory_counters()).cause(survived.oom_kills)
        if code == 128 + signal.SIGKILL and found is not None:
            return found
        return cause_of(signal_in(code), self._child.last_line())

    async def look(self) -> str:
        """Return ``"paused"`` if its first process is held up by a signal; empty otherwise."""
        first = self.first()
        return "paused" if first is not None and first.is_stopped else ""

    async def kill(self) -> None:
        """End everything in the box and remove what it leaves; safe to repeat, not cancelled, bounded."""
        with anyio.CancelScope(shield=True):
            if (first := self.first()) is not None:
                first.kill()
            elif self._child is not None:
                self._child.kill()
            if self._child is not None:
                await self._child.end(grace_s=_GRACE_S)
            else:
                with anyio.move_on_after(_GRACE_S):
                    await self._wait()
            self._memory = self._memory or self.group.memory_counters()  # before the group is removed
            if await empty(self.group) and self._uids is not None:
                self._uids.put_back()
                self._uids = None
            self.let_go()
            if self.folder is not None:
                await clock.to_thread(run_dirs.remove, self.folder)

    def let_go(self) -> None:
        """Close what we hold, without ending anything; safe to repeat."""
        if self._first is not None:
            self._first.close()
        if self._told is not None:
            os.close(self._told)
            self._told = None
        if self._score_line is not None:
            self._score_line.close()
        if self._uids is not None:
            self._uids.close()
            self._uids = None

    async def _wait(self) -> None:
        if self._child is not None:
            await self._child.wait()
        elif self._first is not None:
            await self._first.wait()

    def _join(self, pids: Sequence[int]) -> None:
        for pid in pids:
            self.group.join(pid)
            with suppress(OSError):
                Path(f"/proc/{pid}/oom_score_adj").write_text(str(_VICTIM))
        if self._score_line is not None:
            self._lend(pids[-1], self._score_line)

    def _lend(self, pid: int, line: socket.socket) -> None:
        """Give process 1 files open for writing that it sees read-only: its OOM score, and the agent's cgroup."""
        wanted = {b"s": (Path(f"/proc/{pid}/oom_score_adj"), os.O_RDWR)}
        if self.holds_reserve and self.group.of_agent is not None:
            wanted[b"g"] = self.group.of_agent.door, os.O_WRONLY
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
    """Kill who is in a group, and remove it when they are gone; return False if that takes more than 2 s."""
    with anyio.move_on_after(_EMPTY_S):
        while not group.remove():
            group.kill()
            await anyio.sleep(0.005)
        return True
    return False


def launch(
    look: BwrapOptions,
    command: Sequence[str],
    *,
    stream: socket.socket,
    filter_program: bytes | None,
    group: cgroups.Cgroup,
    bounds: cgroups.CgroupLimits,
    uids: UidRange | None = None,
) -> Supervisor:
    """Make a control group and start bubblewrap, which reads its options where no other user can.

    Args:
        look: What bubblewrap is to make; the views of the group are added.
        command: What it runs.
        stream: Becomes the command's standard input and output; closed here.
        filter_program: The filter of system calls.
        group: The group that is made.
        bounds: The group's.
        uids: Range of uids that it has for itself; None is in our user namespace.

    Raises:
        OSError: There is no bubblewrap, or the kernel refuses the group; then `uids` stay the caller's to close.
    """
    seen = replace(look, views=(*look.views, *group.views()))
    with ExitStack() as undo, ExitStack() as lent:
        told, tells = os.pipe()
        undo.callback(os.close, told)
        lent.callback(os.close, tells)
        arguments = _file_of(b"\0".join(os.fsencode(option) for option in options(seen)))
        lent.callback(os.close, arguments)
        filtering = _file_of(filter_program or b"")
        lent.callback(os.close, filtering)
        score_line, its_end = socket.socketpair()
        undo.callback(score_line.close)
        lent.callback(its_end.close)
        handles = [arguments, tells, filtering, its_end.fileno()]
        argv = ["bwrap", "--args", str(arguments), "--info-fd", str(tells)]
        if filter_program is not None:
            argv += ["--seccomp", str(filtering)]
        if uids is not None:
            argv += ["--userns", str(uids.namespace)]
            handles += [uids.namespace, uids.lock.fileno()]
        argv += ["--", *command, str(its_end.fileno())]
        undo.callback(group.remove)
        group.make(bounds)
        # Bubblewrap's environment would be readable inside.
        child = Child(argv, env={}, stream=stream, name=group.name, pass_fds=handles)
        undo.pop_all()
    return Supervisor(child, group, told=told, score_line=score_line, uids=uids)


def _file_of(content: bytes) -> int:
    """Return a file in memory, to be read from its beginning."""
    handle = os.memfd_create("bwrap")
    os.write(handle, content)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle
