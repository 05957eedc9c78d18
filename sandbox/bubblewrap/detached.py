"""Registry in which other processes find detached sandboxes, which outlive the process that started them.

Each detached sandbox has a folder on the host. The folder's parent depends only on the user, so that all processes of
our user can find it. The folder's name contains the pid of the sandbox's bubblewrap process. After that process has
ended, the folder is removed. The sandbox's id contains the end of the folder's name. A file in the folder records the
sandbox's process 1, its cgroup and its ledger.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from envkit.runs import owners

from ..host import run_dirs

_ID = re.compile(r"bwrap-([a-z0-9_]{4,16})")
_FILE = "first"


@dataclass(frozen=True, slots=True)
class DetachedNote:
    """The registry entry of a detached sandbox."""

    folder: Path
    group: str
    first_pid: int
    ledger: str


def begin(pid: int) -> tuple[str, Path]:
    """Create the folder of a detached sandbox whose bubblewrap process is `pid`; return sandbox id and folder."""
    folder = run_dirs.new_run_folder(pid)
    return f"bwrap-{_tail(folder)}", folder


def record(folder: Path, first_pid: int, group: str, ledger: str) -> None:
    """Register the sandbox: write its process 1, the name of its cgroup and the id of its ledger to `folder`."""
    (folder / _FILE).write_text(f"{owners.owner_name(first_pid)} {group} {ledger}")


def find(sandbox_id: str) -> DetachedNote | None:
    """Return the running detached sandbox with this id; None if our user has no such sandbox on this machine."""
    match = _ID.fullmatch(sandbox_id)
    if match is None:
        return None
    for folder in run_dirs.of_tail(match[1]):
        try:
            first, group, *ledger = (folder / _FILE).read_text().split()
        except (OSError, ValueError):  # The file was removed, or is not yet complete. Treat the sandbox as not running.
            continue
        if not owners.is_owner_gone(first) and not owners.is_owner_gone(folder.name):
            return DetachedNote(folder, group, int(first.split("-")[2]), "".join(ledger))
    return None


def ids(ledger: str | None = None) -> list[str]:
    """Return the sorted ids of our user's detached sandboxes on this machine.

    If `ledger` is not None, return only the sandboxes that the ledger with this id records.
    """
    named = {f"bwrap-{_tail(folder)}" for folder in run_dirs.of_tail("*") if (folder / _FILE).exists()}
    found = {sandbox_id: find(sandbox_id) for sandbox_id in named}
    return sorted(id for id, note in found.items() if note is not None and ledger in (None, note.ledger))


def _tail(folder: Path) -> str:
    return folder.name.rpartition("-")[2]
