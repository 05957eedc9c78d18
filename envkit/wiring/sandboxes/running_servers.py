"""Registry of the servers on this machine that write a ledger: one file per ledger, in a folder that belongs to root.

A server removes its file when it shuts down. If a server is killed, its file stays, so that users can see which server
started the sandboxes that are still running.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from envkit.runs import owners

NOTES = Path("/run/envkit/servers")


@dataclass(frozen=True, slots=True)
class ServerNote:
    """A server that writes a ledger of its sandboxes, as registered in its file.

    Attributes:
        ledger_id: Id of the server's ledger.
        ledger: Path of the server's ledger.
        address: Address of the server, such as ``"http://127.0.0.1:8000"`` or ``"unix:/tmp/env.sock"``.
        pid: Process id of the server.
        process: Unique name of the server's process; a later process with the same pid has a different name.
    """

    ledger_id: str
    ledger: str
    address: str
    pid: int
    process: str

    def is_gone(self) -> bool:
        """Whether the server's process has ended."""
        return owners.is_owner_gone(self.process)


@contextmanager
def noted(ledger_id: str, ledger: Path, address: str, notes: Path = NOTES) -> Iterator[None]:
    """Register this server by a file in the folder `notes` until the ``with`` block ends. Write errors are ignored."""
    pid = os.getpid()
    note = ServerNote(ledger_id, str(ledger.absolute()), address, pid, owners.owner_name(pid))
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
    """Return all servers whose file in the registry is readable."""
    found = []
    with suppress(OSError):
        for path in sorted(notes.iterdir()):
            with suppress(OSError, msgspec.MsgspecError):
                found.append(msgspec.json.decode(path.read_bytes(), type=ServerNote))
    return found


def forget(note: ServerNote, notes: Path = NOTES) -> None:
    """Remove the file of a server from the registry."""
    with suppress(OSError):
        (notes / note.ledger_id).unlink()
