"""Folders sent as tar streams: they arrive unchanged, and entries that lead outside are refused."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.errors import RefusedFileError, TooLargeError, UsageError
from envkit.sandbox.transfer import tar_stream


def run(main: Callable[[], Awaitable[object]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(30):
            await main()

    clock.run(bounded)


async def torn(content: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


def unpack(content: bytes, target: Path, *, max_bytes: int = 1 << 20, size: int = 10_000) -> None:
    run(lambda: tar_stream.unpacked(torn(content, size), target, max_bytes=max_bytes))


def pack(source: Path, name: str = "alone") -> bytes:
    async def main() -> None:
        found.extend([piece async for piece in tar_stream.packed(source, name)])

    found: list[bytes] = []
    run(main)
    return b"".join(found)


def member(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", mode: int = 0o644, size: int = 0) -> bytes:
    """Return the header of a member."""
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode, made.size = kind, link, mode, size
    return made.tobuf(tarfile.GNU_FORMAT)


def archive(*members: bytes, root: bool = True) -> bytes:
    return b"".join([member(".", tarfile.DIRTYPE)] * root + list(members)) + bytes(1024)


def described(folder: Path) -> dict[str, object]:
    """Return the mode and content, or link target, of each path below `folder`."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = (mode, None if path.is_dir() else path.read_bytes())
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with the kinds of files of a project."""
    top = tmp_path / "tree"
    (top / "deep" / "deeper").mkdir(parents=True)
    (top / "empty").mkdir(mode=0o750)
    (top / "bytes").write_bytes(bytes(range(256)) * 5000)
    (top / "nothing").touch(mode=0o600)
    (top / "deep" / "run.sh").write_text("#!/bin/sh\n")
    (top / "deep" / "run.sh").chmod(0o755)
    (top / "deep" / ("long name " * 25)).write_text("x")
    (top / "deep" / "deeper" / "up").symlink_to("../run.sh")
    (top / "deep" / "deeper" / "top").symlink_to("../..")
    (top / "\N{SNOWMAN} two words\n").write_text("unicode")
    (top / os.fsdecode(b"not \xff utf-8")).write_text("bytes")
    (top / "dangling").symlink_to("nowhere")
    (top / ("l" * 100)).symlink_to("x" * 255)
    os.utime(top / "bytes", (1_000_000_000, 1_000_000_000))
    return top


def test_a_folder_arrives_unchanged(tree: Path, tmp_path: Path) -> None:
    unpack(pack(tree), tmp_path / "copy", max_bytes=1 << 22, size=511)
    assert described(tmp_path / "copy") == described(tree)
    assert (tmp_path / "copy" / "bytes").stat().st_mtime == 1_000_000_000


def test_archives_of_pythons_tarfile_are_unpacked_in_each_format(tree: Path, tmp_path: Path) -> None:
    for number, kind in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=kind) as made:
            made.add(tree, ".")
        copy = tmp_path / f"copy-{number}"
        unpack(stream.getvalue(), copy, max_bytes=1 << 22)
        assert described(copy) == described(tree)


def test_packed_archives_can_be_read_by_pythons_tarfile(tree: Path, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(pack(tree))) as made:
        if hasattr(tarfile, "tar_filter"):  # missing before Python 3.11.4
            made.extraction_filter = tarfile.tar_filter
        made.extractall(tmp_path / "copy")
    assert described(tmp_path / "copy") == described(tree)


def test_a_file_that_shrinks_while_it_is_read_damages_no_other_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"a" * (3 << 20))
    (source / "b").write_bytes(b"b")

    async def main() -> None:
        pieces = tar_stream.packed(source, "source")
        content = await anext(pieces)
        os.truncate(source / "a", 10)
        content += b"".join([piece async for piece in pieces])
        await tar_stream.unpacked(torn(content), tmp_path / "copy", max_bytes=1 << 22)

    run(main)
    assert (tmp_path / "copy" / "a").read_bytes() == (b"a" * (1 << 20)).ljust(3 << 20, b"\0")
    assert (tmp_path / "copy" / "b").read_bytes() == b"b"


BAD: dict[str, tuple[list[bytes], str]] = {
    "absolute name": ([member("/etc/passwd")], "'/etc/passwd' leads out"),
    "name upwards": ([member("../x")], "'../x' leads out"),
    "absolute link": ([member("l", tarfile.SYMTYPE, link="/etc/passwd")], "'l' is a link to '/etc/passwd'"),
    "link upwards later": (
        [member("d", tarfile.DIRTYPE), member("d/l", tarfile.SYMTYPE, link="./../../x")],
        "'d/l' is a link to",
    ),
    "link upwards by a link": (
        [
            member("d", tarfile.DIRTYPE),
            member("d/up", tarfile.SYMTYPE, link=".."),
            member("d/l", tarfile.SYMTYPE, link="up/../x"),
        ],
        "'d/l' is a link to 'up/../x'",
    ),
    "file through a link": (
        [member("d", tarfile.DIRTYPE), member("l", tarfile.SYMTYPE, link="d"), member("l/x")],
        "'l/x': Not a directory",
    ),
    "file over a link": ([member("l", tarfile.SYMTYPE, link="d"), member("l")], "'l': File exists"),
    "hard link": ([member("x", tarfile.LNKTYPE, link="y")], "'x' is not a file, folder or symbolic link"),
    "device": ([member("x", tarfile.BLKTYPE)], "'x' is not a file, folder or symbolic link"),
    "no folder": ([member("d/x")], "'d/x': No such file"),
    "two wholes": ([member(".", tarfile.DIRTYPE)], "'.': the first entry, and only it, must be the root of the tree"),
    "endless name": (
        [member("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=1 << 30)],
        "name or extended header too large (1073741824 bytes, limit 65536)",
    ),
    "broken record": ([member("x", tarfile.XHDTYPE, size=5), b"9 a=b".ljust(512, b"\0")], "invalid tar stream"),
    "size elsewhere": (
        [member("x", tarfile.XHDTYPE, size=11), b"11 size=99\n".ljust(512, b"\0")],
        "invalid tar stream",
    ),
    "garbage": ([b"x" * 512], "invalid tar stream"),
    "name too long": (
        [member("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=300), b"n" * 300 + bytes(212), member("n")],
        "File name too long",
    ),
    "NUL in a link": (
        [
            member("././@LongLink", tarfile.GNUTYPE_LONGLINK, size=3),
            b"a\0b".ljust(512, b"\0"),
            member("n", tarfile.SYMTYPE),
        ],
        "'n' is a link to",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_an_entry_that_leads_outside_is_refused_by_name_and_leaves_nothing(what: str, tmp_path: Path) -> None:
    members, message = BAD[what]
    with pytest.raises(RefusedFileError) as caught:
        unpack(archive(member("good"), *members), tmp_path / "copy")
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        member(".", tarfile.DIRTYPE),
        archive()[:-1024] + member("x", size=10),
        member("d/x") + bytes(1024),
    ],
    ids=["nothing", "no end", "no content", "a file that is not alone"],
)
def test_an_incomplete_stream_is_refused_and_leaves_nothing(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(RefusedFileError):
        unpack(content, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_bytes_after_the_end_are_ignored(tmp_path: Path) -> None:
    unpack(archive(member("x")) + b"junk" * 5000, tmp_path / "copy")
    assert described(tmp_path / "copy") == {"x": (0o644, b"")}


def test_dangerous_mode_bits_are_dropped_and_the_files_stay_readable(tmp_path: Path) -> None:
    members = [
        member("setuid", mode=0o6777),
        member("closed", mode=0),
        member("folder", tarfile.DIRTYPE, mode=0o2000),
        member("folder/inner", mode=0o640),
    ]
    unpack(archive(*members), tmp_path / "copy")
    assert described(tmp_path / "copy") == {
        "setuid": (0o777, b""),
        "closed": (0o400, b""),
        "folder": (0o700, None),
        "folder/inner": (0o640, b""),
    }


def test_a_size_above_the_limit_is_refused_before_the_content_arrives(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield member(".", tarfile.DIRTYPE) + member("x", size=1 << 40)
        for _ in range(20):
            yield bytes(64 << 10)
        raise AssertionError("the reader requested more pieces than it may buffer")

    with pytest.raises(TooLargeError, match="more than 1000 bytes"):
        run(lambda: tar_stream.unpacked(endless(), tmp_path / "copy", max_bytes=1000))


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_an_existing_target_is_not_changed(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    make: dict[str, Callable[[], object]] = {
        "file": target.touch,
        "folder": target.mkdir,
        "dangling link": lambda: target.symlink_to("nowhere"),
    }
    make[kind]()
    with pytest.raises(UsageError, match="copy exists already"):
        unpack(archive(member("x")), target)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize("error", [RuntimeError("the source failed"), TimeoutError()])
def test_a_source_that_fails_in_the_middle_leaves_nothing(error: Exception, tmp_path: Path) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield archive(member("x"))[:-512]
        raise error

    with pytest.raises(type(error)):
        run(lambda: tar_stream.unpacked(failing(), tmp_path / "copy", max_bytes=1000))
    assert list(tmp_path.iterdir()) == []


def test_folders_too_deep_for_the_programs_of_the_host_are_refused(tmp_path: Path) -> None:
    deep = [member("/".join(["d"] * depth), tarfile.DIRTYPE) for depth in range(1, 300)]
    unpack(archive(*deep[:256]), tmp_path / "deep")
    with pytest.raises(RefusedFileError, match="is more than 256 folders deep"):
        unpack(archive(*deep), tmp_path / "deeper")
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
