"""The agent moves files and folders, with its user's rights and no others."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from envkit.sandbox.agent.files import tar
from tests.sandbox.agent.agent_process import Client, started

MIB = 1 << 20


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Client]:
    with started(tmp_path) as client:
        yield client


def archive(*entries: tarfile.TarInfo, form: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive in which each file holds its own name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for entry in entries:
            content = entry.name.encode() if entry.isreg() else b""
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode, made.mtime = kind, link, mode, 1_000_000_000
    return made


def test_reading_a_large_file_neither_delays_other_calls_nor_fills_the_memory(sandbox: Client, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(100 * MIB)
    reading = sandbox.start("read", path="large", max_bytes=100 * MIB)
    ping = sandbox.start("ping")
    seen_before_ping = 0
    while (frame := sandbox.frame())[0]["id"] != ping:
        seen_before_ping += len(frame[1])
    assert seen_before_ping < 10 * MIB
    size = seen_before_ping
    while "end" not in (frame := sandbox.frame())[0]:
        size += len(frame[1])
    assert (size, frame[0]["id"]) == (100 * MIB, reading)
    assert int(Path(f"/proc/{sandbox.pid}/status").read_text().split("VmHWM:")[1].split()[0]) < 64 << 10


def test_files_that_vanish_while_a_tree_is_packed_are_left_out(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_text("gone" if name in "bc" else "here")
    (tmp_path / "e").symlink_to("nowhere")
    (tmp_path / "f").mkdir()
    content = bytearray()

    def write(piece: bytes) -> None:
        content.extend(piece)
        if piece == b"here":
            for name in ("b", "c", "e"):
                (tmp_path / name).unlink(missing_ok=True)
            if (tmp_path / "f").exists():
                (tmp_path / "f").rmdir()

    tar.pack(bytes(tmp_path), write)
    with tarfile.open(fileobj=io.BytesIO(content)) as found:
        assert found.getnames() == [".", "a", "d"]


def test_unpacking_replaces_existing_folders_and_links(sandbox: Client, tmp_path: Path) -> None:
    (tmp_path / "tree/folder").mkdir(parents=True)
    (tmp_path / "outside").write_text("kept")
    (tmp_path / "tree/a").symlink_to("../outside")
    assert (
        sandbox.call("unpack", path="tree", feed=archive(entry("folder", tarfile.DIRTYPE), entry("a")))["end"] is True
    )
    assert ((tmp_path / "tree/a").read_text(), (tmp_path / "outside").read_text()) == ("a", "kept")


BAD = {
    "absolute": [entry("/tmp/envkit-bad")],
    "up": [entry("../bad")],
    "up inside": [entry("a/../../bad")],
    "hard link": [entry("a", tarfile.LNKTYPE, link="../bad")],
    "device": [entry("a", tarfile.CHRTYPE)],
    "pipe": [entry("a", tarfile.FIFOTYPE)],
}


def test_archive_entries_that_lead_outside_are_refused(sandbox: Client, tmp_path: Path) -> None:
    for name in BAD:
        assert sandbox.call("unpack", path="in/tree", feed=archive(*BAD[name]))["error"] == "refused", name
        assert not (tmp_path / "in/bad").exists()
        assert not Path("/tmp/envkit-bad").exists()
    assert sandbox.call("ping")["end"] is True


def test_input_that_is_not_an_archive_is_refused(sandbox: Client) -> None:
    two = archive(entry("a"), entry("b"))
    wrong = (
        two[:1024] + bytes([two[1024] ^ 1]) + two[1025:]
    )  # the name of the second entry, so that its checksum is wrong
    for content in (b"", b"x" * 5000, archive(entry("a"))[:700], two[:1024], two[:1200], wrong):
        assert sandbox.call("unpack", path="tree", feed=content)["error"] == "refused"
