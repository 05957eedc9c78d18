"""The processes of vLLM servers: each server is the leader of a session and process group of its own.

If envkit and a server are killed at once, the server's other processes keep running. So each server has a record in a
private folder, with which the next start finds and ends them. A process is identified by its pid and its start time,
because pids are reused.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio

from envkit import clock
from envkit.errors import UsageError

TERM_S = 10.0
"""Seconds to wait for processes to end after SIGTERM."""
_KILL_S = 2.0
"""Seconds to wait for processes to end after SIGKILL."""
_POLL_S = 0.1
_TRACKER = b"multiprocessing.resource_tracker"
"""Part of the command line of the process that removes the shared memory of the others when they have ended."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A server that was started.

    Attributes:
        pid: Pid of the server's first process, which is also the id of its session and process group.
        started: Start time of that process in clock ticks since boot.
        owner_pid: Pid of the process that started the server.
        owner_started: Start time of that process.
    """

    pid: int
    started: int
    owner_pid: int
    owner_started: int

    @classmethod
    def of(cls, pid: int) -> ServerRecord:
        """Return the record of the server `pid`, a child of this process that has not been waited for."""
        return cls(pid, started_at(pid) or 0, os.getpid(), started_at(os.getpid()) or 0)

    def save(self, folder: Path) -> None:
        """Write the record into `folder`."""
        draft = folder / f".{self.pid}"
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.rename(self._file(folder))

    def delete(self, folder: Path) -> None:
        """Delete the record, if it exists."""
        self._file(folder).unlink(missing_ok=True)

    def is_orphaned(self) -> bool:
        """Whether the process that started the server has ended."""
        return started_at(self.owner_pid) != self.owner_started

    def _file(self, folder: Path) -> Path:
        return folder / f"{self.pid}.json"


def private_folder() -> Path:
    """Return the folder of records and logs, in the folder for temporary files; create it if it is missing.

    Raises:
        UsageError: Another user could write to the folder.
    """
    folder = Path(tempfile.gettempdir()) / f"envkit-vllm-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(f"{folder} is not a private folder of this user; remove it, or set TMPDIR to another folder")
    return folder


async def end_orphans(folder: Path, announce: Callable[[str], object]) -> None:
    """End what still runs of servers whose owner has ended, and delete their records."""
    for record in await clock.to_thread(_orphans, folder):
        # If the pid belongs to a younger process, no process of the server runs any more.
        if started_at(record.pid) in (None, record.started) and (count := len(members(record.pid))):
            announce(f"ending {count} processes of a vLLM server (pid {record.pid}) whose owner was killed")
            await end_group(record.pid)
        record.delete(folder)


async def end_group(group: int, *, term_s: float = TERM_S) -> None:
    """End all processes of a server: SIGTERM, and after `term_s` seconds SIGKILL.

    The process that removes shared memory gets SIGKILL only when the others have ended and it has not.
    """
    _signal(members(group), signal.SIGTERM, signal.SIGCONT)
    if not await _is_gone(group, term_s):
        _signal([pid for pid in members(group) if not _is_tracker(pid)], signal.SIGKILL)
        if not await _is_gone(group, _KILL_S):
            _signal(members(group), signal.SIGKILL)
            await _is_gone(group, _KILL_S)


def members(group: int) -> list[int]:
    """Return the pids of the processes of this user in the session and process group `group`, without zombies."""
    return [pid for pid in _pids() if _is_member(pid, group)]


def started_at(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process, or it is a zombie."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


async def _is_gone(group: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds until the group has no process; return whether that is so."""
    with anyio.move_on_after(timeout_s):
        while await clock.to_thread(members, group):  # noqa: ASYNC110 - the kernel sets no event
            await anyio.sleep(_POLL_S)
        return True
    return False


def _orphans(folder: Path) -> list[ServerRecord]:
    records = []
    for file in folder.glob("*.json"):
        try:
            record = ServerRecord(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:  # another process has just deleted it
            continue
        except (ValueError, TypeError):
            file.unlink(missing_ok=True)
            continue
        if record.is_orphaned():
            records.append(record)
    return records


def _signal(pids: list[int], *numbers: signal.Signals) -> None:
    for pid in pids:
        for number in numbers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _is_member(pid: int, group: int) -> bool:
    fields = _stat(pid)
    if fields is None or fields[2:4] != [str(group), str(group)]:
        return False
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on; None if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields
