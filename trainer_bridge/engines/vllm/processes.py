"""The processes of vLLM servers: each server is the leader of a session and process group of its own.

If envkit and a server are killed at once, the server's other processes keep running. So each server has a record in a
private folder, with which the next start finds and ends them. A process is identified by its pid and its start time,
because pids are reused.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from envkit import clock
from envkit.runs.folder import private_folder

from .plugin.envkit_processes import end_group, members, started_at

_LOGS_S = 7 * 24 * 3600.0
"""The log of a server that ended by itself is kept for this time after its last line."""


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


def servers_folder() -> Path:
    """Return the folder of records and logs, in the folder for temporary files; create it if it is missing.

    Raises:
        UsageError: Other users can read or write the folder.
    """
    return private_folder(Path(tempfile.gettempdir()) / f"envkit-vllm-{os.geteuid()}")


async def end_orphans(folder: Path, announce: Callable[[str], object]) -> None:
    """End what still runs of servers whose owner has ended, and delete their records. Delete old logs, too."""
    await clock.to_thread(_delete_old_logs, folder)
    for record in await clock.to_thread(_orphans, folder):
        # If the pid belongs to a younger process, no process of the server runs any more.
        if started_at(record.pid) in (None, record.started) and (count := len(members(record.pid))):
            announce(f"ending {count} processes of a vLLM server (pid {record.pid}) whose owner was killed")
            await clock.to_thread(end_group, record.pid)
        record.delete(folder)


def _delete_old_logs(folder: Path) -> None:
    for log in folder.glob("*.log"):
        with suppress(FileNotFoundError):  # another process has just deleted it
            if log.stat().st_mtime < clock.wall() - _LOGS_S:
                log.unlink()


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
