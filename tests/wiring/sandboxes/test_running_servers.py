"""The notes by which people see whose sandboxes are."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from envkit.wiring.sandboxes import running_servers


def test_a_note_exists_as_long_as_its_server(tmp_path: Path) -> None:
    notes = tmp_path / "run" / "servers"
    ledger = tmp_path / "fleet.sqlite"
    with running_servers.noted("a1", ledger, "http://[::1]:8000", notes):
        (note,) = running_servers.known(notes)
        assert (note.ledger_id, note.ledger, note.address, note.pid) == (
            "a1",
            str(ledger),
            "http://[::1]:8000",
            os.getpid(),
        )
        assert not note.is_gone()
        assert notes.stat().st_mode & 0o777 == 0o700
    assert running_servers.known(notes) == []

    with suppress(RuntimeError), running_servers.noted("a1", ledger, "http://[::1]:8000", notes):
        raise RuntimeError
    assert running_servers.known(notes) == []


def test_a_server_without_a_folder_for_notes_works_and_unreadable_notes_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with running_servers.noted("a1", tmp_path / "fleet.sqlite", "unix:/tmp/s", tmp_path / "file" / "below"):
        assert running_servers.known(tmp_path / "file" / "below") == []
    (tmp_path / "odd").write_text("{")
    assert [note.ledger_id for note in running_servers.known(tmp_path)] == []
