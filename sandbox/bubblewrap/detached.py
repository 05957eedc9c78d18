"""Boxes that outlive the process that started them, and how another process finds them.

Such a box has a folder of its own whose owner is the box's bubblewrap, so that it is cleared away once that is gone,
and the end of whose name is in the box's id. It lies where every process of our user looks, whatever its environment,
and in it one file that names the box's first process, its group, and the ledger that knows of it.
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
    """A box that stays.

    Attributes:
        folder: Its folder.
        group: Name of its control group.
        first_pid: Number of its first process.
        ledger: Id of the ledger in which it is written down; empty for none.
    """

    folder: Path
    group: str
    first_pid: int
    ledger: str


def begin(pid: int) -> tuple[str, Path]:
    """Return the id and the new folder of a box whose bubblewrap is process `pid`."""
    folder = run_dirs.new_run_folder(pid)
    return f"bwrap-{_tail(folder)}", folder


def remember(folder: Path, first_pid: int, group: str, ledger: str) -> None:
    """Write down the box's first process, the name of its control group, and the id of its ledger."""
    (folder / _FILE).write_text(f"{run_dirs.owner_name(first_pid)} {group} {ledger}")


def find(sandbox_id: str) -> DetachedNote | None:
    """Return the box of this id; None when none of our user's on this machine has it any more."""
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
    """Return the ids of all boxes of our user on this machine, or of those of one ledger, sorted."""
    named = {f"bwrap-{_tail(folder)}" for folder in run_dirs.of_tail("*") if (folder / _FILE).exists()}
    found = {sandbox_id: find(sandbox_id) for sandbox_id in named}
    return sorted(id for id, stay in found.items() if stay is not None and ledger in (None, stay.ledger))


def _tail(folder: Path) -> str:
    return folder.name.rpartition("-")[2]
