"""Which servers of this machine have sandboxes that stay: a note for each ledger, where every process of root looks.

A note goes with its server when that ends by itself. One that was killed leaves it, so that people see whose its
sandboxes are until the next server takes them back, or they end.
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
    """A server that writes its sandboxes down.

    Attributes:
        ledger_id: Id of its ledger.
        ledger: Path of its ledger.
        address: Where it is reached, such as ``"http://127.0.0.1:8000"`` or ``"unix:/tmp/env.sock"``.
        pid: Number of its process.
        process: Its process, as no later one is called.
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
    """Have a note of this process in the folder `notes` for the length of the block.

    A machine where none can be written goes without.
    """
    pid = os.getpid()
    note = ServerNote(ledger_id, str(ledger.absolute()), address, pid, run_dirs.owner_name(pid))
    place = notes / ledger_id
    with suppress(OSError):
        notes.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = place.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(asdict(note)))
        beside.rename(place)
    try:
        yield
    finally:
        forget(note, notes)


def known(notes: Path = NOTES) -> list[ServerNote]:
    """Return the notes that there are; none where we may not look."""
    found = []
    with suppress(OSError):
        for place in sorted(notes.iterdir()):
            with suppress(OSError, msgspec.MsgspecError):
                found.append(msgspec.json.decode(place.read_bytes(), type=ServerNote))
    return found


def forget(note: ServerNote, notes: Path = NOTES) -> None:
    """Remove a note."""
    with suppress(OSError):
        (notes / note.ledger_id).unlink()
