"""Notes about running servers with detached sandboxes: one file per ledger, in a folder that root's processes share.

A server removes its note when it shuts down. If a server is killed, its note stays, so that users can see who owns the
sandboxes until the next server re-adopts them or they end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from envkit.sandbox.host import run_dirs

NOTES = Path("/run/envkit/servers")


@dataclass(frozen=True, slots=True)
class ServerNote:
    """A server with a ledger of its sandboxes.

    Attributes:
        ledger_id: Id of its ledger.
        ledger: Path of its ledger.
        address: Its address, such as ``"http://127.0.0.1:8000"`` or ``"unix:/tmp/env.sock"``.
        pid: Its process id.
        process: Unique name of its process; a later process with the same pid has another name.
    """

    ledger_id: str
    ledger: str
    address: str
    pid: int
    process: str

    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return run_dirs.is_owner_gone(self.process)


@contextmanager
def noted(ledger_id: str, ledger: Path, address: str, notes: Path = NOTES) -> Iterator[None]:
    """Store a note about this process in the folder `notes` during the block; write errors are ignored."""
    pid = os.getpid()
    note = ServerNote(ledger_id, str(ledger.absolute()), address, pid, run_dirs.owner_name(pid))
    path = notes / ledger_id
    with suppress(OSError):
        notes.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(asdict(note)))
        draft.rename(path)
    try:
        yield
    finally:
        forget(note, notes)


def known(notes: Path = NOTES) -> list[ServerNote]:
    """Return all readable notes."""
    found = []
    with suppress(OSError):
        for path in sorted(notes.iterdir()):
            with suppress(OSError, msgspec.MsgspecError):
                found.append(msgspec.json.decode(path.read_bytes(), type=ServerNote))
    return found


def forget(note: ServerNote, notes: Path = NOTES) -> None:
    """Remove a note."""
    with suppress(OSError):
        (notes / note.ledger_id).unlink()
