"""Registry of detached sandboxes, which outlive the process that started them, so that another process finds them.

The folder of a detached sandbox is owned by its bubblewrap process, so it is reaped once that has ended. The sandbox's
id contains the end of the folder's name. The folder is where every process of our user searches, whatever its
environment. One file in it names the sandbox's process 1, its cgroup and the ledger that records it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..host import run_dirs

_ID = re.compile(r"bwrap-([a-z0-9_]{4,16})")
_FILE = "first"


@dataclass(frozen=True, slots=True)
class DetachedNote:
    """A detached sandbox.

    Attributes:
        folder: Its folder.
        group: Name of its cgroup.
        first_pid: Pid of its process 1.
        ledger: Id of the ledger that records it; empty for none.
    """

    folder: Path
    group: str
    first_pid: int
    ledger: str


def begin(pid: int) -> tuple[str, Path]:
    """Return the id and the new folder of a sandbox whose bubblewrap is process `pid`."""
    folder = run_dirs.new_run_folder(pid)
    return f"bwrap-{_tail(folder)}", folder


def record(folder: Path, first_pid: int, group: str, ledger: str) -> None:
    """Write the sandbox's process 1, the name of its cgroup and the id of its ledger to `folder`."""
    (folder / _FILE).write_text(f"{run_dirs.owner_name(first_pid)} {group} {ledger}")


def find(sandbox_id: str) -> DetachedNote | None:
    """Return the running sandbox of this id; None if our user has none on this machine."""
    match = _ID.fullmatch(sandbox_id)
    if match is None:
        return None
    for folder in run_dirs.of_tail(match[1]):
        try:
            first, group, *ledger = (folder / _FILE).read_text().split()
        except (OSError, ValueError):  # gone, or just being written
            continue
        if not run_dirs.is_owner_gone(first) and not run_dirs.is_owner_gone(folder.name):
            return DetachedNote(folder, group, int(first.split("-")[2]), "".join(ledger))
    return None


def ids(ledger: str | None = None) -> list[str]:
    """Return the sorted ids of our user's detached sandboxes on this machine, optionally of one ledger."""
    named = {f"bwrap-{_tail(folder)}" for folder in run_dirs.of_tail("*") if (folder / _FILE).exists()}
    found = {sandbox_id: find(sandbox_id) for sandbox_id in named}
    return sorted(id for id, note in found.items() if note is not None and ledger in (None, note.ledger))


def _tail(folder: Path) -> str:
    return folder.name.rpartition("-")[2]
