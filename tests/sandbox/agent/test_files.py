"""The agent moves files and folders, with its user's rights and no others."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from envkit.sandbox.agent.files import tar
from tests.sandbox.agent.agent_process import Client, started

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
MIB = 1 << 20


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Client]:
    with started(tmp_path) as client:
        yield client


@pytest.fixture
def users_sandbox() -> Iterator[tuple[Client, Path]]:
    """A sandbox with its own users, and its working folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        work = Path(folder, "work")
        work.mkdir()
        Path(folder).chmod(0o755)
        os.chown(work, 1000, 1000)
        with started(work, agent_uid=1000, grader_uid=1001) as client:
            yield client, work


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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


def test_a_written_file_is_read_back(sandbox: Client, tmp_path: Path) -> None:
    content = os.urandom(3 * MIB + 17)
    assert sandbox.call("write", path="a/b/c", mode=0o640, feed=content)["end"] is True
    answer = sandbox.call("read", path=str(tmp_path / "a/b/c"), max_bytes=4 * MIB)
    assert (answer.data, answer["size"], answer["mode"]) == (content, len(content), 0o640)
    assert names(tmp_path / "a/b") == ["c"]


def test_an_empty_file_is_written_and_read_back(sandbox: Client) -> None:
    assert sandbox.call("write", path="empty", mode=0o644, feed=b"")["end"] is True
    answer = sandbox.call("read", path="empty", max_bytes=0)
    assert (answer.data, answer["size"]) == (b"", 0)


def test_a_cancelled_write_leaves_the_old_file(sandbox: Client, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    number = sandbox.start("write", path="a", mode=0o644)
    sandbox.feed(number, b"new", end=False)
    sandbox.send({"id": number, "cancel": True})
    assert sandbox.answer(number)["end"] is True
    assert (names(tmp_path), (tmp_path / "a").read_text()) == (["a"], "old")


def test_a_write_replaces_a_link_and_not_its_target(sandbox: Client, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "link").symlink_to("kept")
    sandbox.call("write", path="link", mode=0o644, feed=b"new")
    assert ((tmp_path / "kept").read_text(), (tmp_path / "link").read_text()) == ("kept", "new")
    assert not (tmp_path / "link").is_symlink()


def test_paths_that_cannot_be_read_are_missing(sandbox: Client, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in ("none", ".", "pipe", "loop", "/dev/zero", "a\0b"):
        assert sandbox.call("read", path=path, max_bytes=MIB)["error"] == "missing", path


def test_a_file_that_is_too_large_is_not_read(sandbox: Client, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 101)
    answer = sandbox.call("read", path="large", max_bytes=100)
    assert (answer["error"], answer.data) == ("too_large", b"")


def test_a_file_of_unknown_size_is_read_to_its_end(sandbox: Client) -> None:
    assert sandbox.call("read", path="/proc/version", max_bytes=MIB).data == Path("/proc/version").read_bytes()


def test_writes_to_invalid_paths_are_refused(sandbox: Client, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in ("folder", "file/below", "", "folder/", "a\0b", "/proc/none"):
        assert sandbox.call("write", path=path, mode=0o644, feed=b"x")["error"] == "refused", path
    assert names(tmp_path) == ["file", "folder"]


def test_a_full_disk_refuses_and_leaves_nothing(sandbox: Client, tmp_path: Path) -> None:
    assert sandbox.call("write", path="/dev/full/x", mode=0o644, feed=b"x")["error"] == "refused"


def test_reading_a_large_file_neither_delays_other_calls_nor_fills_the_memory(sandbox: Client, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(200 * MIB)
    reading = sandbox.start("read", path="large", max_bytes=200 * MIB)
    ping = sandbox.start("ping")
    seen_before_ping = 0
    while (frame := sandbox.frame())[0]["id"] != ping:
        seen_before_ping += len(frame[1])
    assert seen_before_ping < 10 * MIB
    size = seen_before_ping
    while "end" not in (frame := sandbox.frame())[0]:
        size += len(frame[1])
    assert (size, frame[0]["id"]) == (200 * MIB, reading)
    assert int(Path(f"/proc/{sandbox.pid}/status").read_text().split("VmHWM:")[1].split()[0]) < 64 << 10


@as_root
def test_files_belong_to_the_agents_user_and_links_give_it_no_further_access(
    users_sandbox: tuple[Client, Path],
) -> None:
    sandbox, work = users_sandbox
    secret = work.parent / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    (work / "link").symlink_to(secret)
    (work / "out").symlink_to("/root")
    assert sandbox.call("write", path="new/file", mode=0o600, feed=b"x")["end"] is True
    assert {(work / name).stat().st_uid for name in ("new", "new/file")} == {1000}
    assert sandbox.call("read", path="new/file", max_bytes=10).data == b"x"
    assert sandbox.call("read", path="link", max_bytes=10)["error"] == "missing"
    assert sandbox.call("write", path="out/file", mode=0o600, feed=b"x")["error"] == "refused"
    assert sandbox.call("write", path="/etc/envkit-test", mode=0o600, feed=b"x")["error"] == "refused"
    assert sandbox.call("pack", path="/root", max_bytes=MIB)["error"] == "missing"
    packed = sandbox.call("unpack", path="out/tree", feed=archive(entry("a")))
    assert packed["error"] == "refused"
    assert sandbox.call("unpack", path="tree", feed=archive(entry("a")))["end"] is True
    assert (work / "tree/a").stat().st_uid == 1000


def test_packing_keeps_names_contents_links_and_modes(sandbox: Client, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    long = "n" * 200
    (tree / "inner" / long).mkdir(parents=True)
    (tree / "inner" / long / "f").write_bytes(b"deep")
    (tree / "program").write_bytes(b"p" * 1000)
    (tree / "program").chmod(0o755)
    (tree / "\u00e9\udcff").write_bytes(b"odd name")
    (tree / "link").symlink_to("inner/" + long)
    (tree / "far").symlink_to("x" * 150)
    (tree / "empty").touch()
    os.mkfifo(tree / "pipe")
    os.utime(tree / "program", (5, 1234567890))
    answer = sandbox.call("pack", path="tree", max_bytes=MIB)
    assert answer["end"] is True
    with tarfile.open(fileobj=io.BytesIO(answer.data)) as tar:
        found = {member.name: member for member in tar}
        contents = {name: tar.extractfile(member).read() for name, member in found.items() if member.isreg()}  # type: ignore[union-attr]
    assert contents == {
        f"inner/{long}/f": b"deep",
        "program": b"p" * 1000,
        "\u00e9\udcff": b"odd name",
        "empty": b"",
    }
    assert next(iter(found)) == "."
    assert {name for name, member in found.items() if member.isdir()} == {".", "inner", f"inner/{long}"}
    assert (found["link"].linkname, found["far"].linkname) == (f"inner/{long}", "x" * 150)
    assert (stat.S_IMODE(found["program"].mode), found["program"].mtime) == (0o755, 1234567890)


def test_a_single_file_is_packed_under_its_name(sandbox: Client, tmp_path: Path) -> None:
    (tmp_path / "alone").write_text("a")
    with tarfile.open(fileobj=io.BytesIO(sandbox.call("pack", path="alone", max_bytes=MIB).data)) as tar:
        assert tar.getnames() == ["alone"]


def test_a_tree_that_is_too_large_is_not_packed(sandbox: Client, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(3 * MIB))
    answer = sandbox.call("pack", path=".", max_bytes=MIB)
    assert (answer["error"], len(answer.data) <= MIB) == ("too_large", True)


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


def test_packing_a_path_that_does_not_exist_reports_it_as_missing(sandbox: Client) -> None:
    answer = sandbox.call("pack", path="none", max_bytes=MIB)
    assert (answer["error"], answer["text"].endswith("/none: No such file or directory")) == ("missing", True)


def test_unpacking_keeps_names_contents_links_and_modes(sandbox: Client, tmp_path: Path) -> None:
    long = f"{'n' * 150}/\u4f60"
    entries = [
        entry(".", tarfile.DIRTYPE, mode=0o700),
        entry("closed", tarfile.DIRTYPE, mode=0o555),
        entry("closed/file", mode=0o755),
        entry(long),
        entry("link", tarfile.SYMTYPE, link="closed/file"),
        entry("closed/up", tarfile.SYMTYPE, link="../link"),
    ]
    answer = sandbox.call("unpack", path="deep/tree", feed=archive(*entries))
    tree = tmp_path / "deep/tree"
    assert answer.end == {"id": 1, "end": True}
    assert (tree / long).read_text() == long
    assert (tree / "closed/up").read_text() == "closed/file"
    assert [stat.S_IMODE((tree / name).stat().st_mode) for name in ("closed", "closed/file")] == [0o555, 0o755]
    assert (tree / "closed/file").stat().st_mtime == 1_000_000_000


def test_a_large_tree_is_unpacked_and_packed_again(sandbox: Client, tmp_path: Path) -> None:
    entries = [entry(f"d{n % 10}/f{n}") for n in range(1000)]
    assert sandbox.call("unpack", path="tree", feed=archive(*entries))["end"] is True
    with tarfile.open(fileobj=io.BytesIO(sandbox.call("pack", path="tree", max_bytes=4 * MIB).data)) as tar:
        assert {member.name for member in tar if member.isreg()} == {e.name for e in entries}


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


@pytest.mark.parametrize("name", BAD)
def test_archive_entries_that_lead_outside_are_refused(sandbox: Client, tmp_path: Path, name: str) -> None:
    assert sandbox.call("unpack", path="in/tree", feed=archive(*BAD[name]))["error"] == "refused"
    assert not (tmp_path / "in/bad").exists()
    assert not Path("/tmp/envkit-bad").exists()
    assert sandbox.call("ping")["end"] is True


@pytest.mark.parametrize("content", [b"", b"x" * 5000, archive(entry("a"))[:700]], ids=["empty", "garbage", "torn"])
def test_input_that_is_not_an_archive_is_refused(sandbox: Client, content: bytes) -> None:
    assert sandbox.call("unpack", path="tree", feed=content)["error"] == "refused"


def test_packing_can_be_cancelled(sandbox: Client, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    number = sandbox.start("pack", path=".", max_bytes=2 << 30)
    sandbox.next(number)
    sandbox.send({"id": number, "cancel": True})
    answer = sandbox.answer(number)
    assert len(answer.data) < 100 * MIB
    assert sandbox.call("stats")["processes"] <= 2
