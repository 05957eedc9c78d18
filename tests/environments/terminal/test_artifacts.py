"""Archives of artifacts: an agent that is root can replace the program that packs them."""

from __future__ import annotations

import io
import subprocess
import tarfile
from typing import Any, cast

import pytest

from envkit import clock
from envkit.environments.terminal import artifacts
from envkit.environments.terminal.artifacts import MAX_DEPTH, pack, rewritten
from envkit.environments.terminal.formats import read_tasks
from envkit.environments.terminal.options import OWN_TASKS
from envkit.protocols import Sandbox
from envkit.types import ExecResult


class _Replaced:
    """A sandbox in which every program prints `archive`."""

    def __init__(self, archive: bytes) -> None:
        self._archive = archive

    async def exec(self, *_: object, **__: Any) -> ExecResult:
        return ExecResult(exit_code=0, stdout_bytes=self._archive)


def _archive(*members: tarfile.TarInfo, compression: str = "") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=f"w:{compression}") as tar:  # type: ignore[call-overload]
        for member in members:
            tar.addfile(member)
    return content.getvalue()


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


_LOOP = bytearray(_archive(_member("workspace/a"))[:512])
_LOOP[124:136] = b"\xff" * 10 + (-1024 & 0xFFFF).to_bytes(2, "big")  # a negative size
_LOOP[148:156] = b" " * 8
_LOOP[148:156] = f"{sum(_LOOP):06o}\0 ".encode()


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (_archive(_member("workspace/../etc/x")), "outside"),
        (_archive(_member("etc/x")), "outside"),
        (_archive(_member("workspace/x", tarfile.LNKTYPE, "etc/passwd")), "outside"),
        (_archive(_member("workspace/x", tarfile.SYMTYPE, "/etc"), _member("workspace/x/y")), "below a link"),
        (_archive(_member("workspace/x", tarfile.CHRTYPE)), "a device"),
        (_archive(_member("workspace/x"), compression="gz"), "refused"),
        (_archive(_member("workspace/x", tarfile.GNUTYPE_LONGNAME))[:512] * 3000, "refused"),
        (_archive(_member("workspace/a"))[:512] * 2 + bytes(_LOOP), "refused"),
    ],
    ids=["parent", "other folder", "hard link", "below a link", "device", "compressed", "recursion", "loop"],
)
def test_archives_that_may_leave_their_folder_or_stop_envkit_are_refused(archive: bytes, reason: str) -> None:
    task = read_tasks(OWN_TASKS)[0]
    found = clock.run(lambda: pack(cast("Sandbox", _Replaced(archive)), task))
    assert isinstance(found, str)
    assert reason in found


def _names(archive: bytes) -> list[str]:
    """Return what GNU tar, which unpacks artifacts, finds in an archive."""
    return subprocess.run(["tar", "-tf", "-"], input=archive, capture_output=True, check=True).stdout.decode().split()


def _bad_size() -> bytes:
    """Return a member whose size Python's tarfile takes for the end of the archive, and GNU tar for 0."""
    header = bytearray(_archive(_member("app/x"))[:512])
    header[124:136] = b"0000000 0000"
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


def _sparse_name() -> bytes:
    """Return a member that Python's tarfile calls app/fine, and GNU tar usr/bin/cat."""
    member = _member("app/fine")
    member.pax_headers = {"GNU.sparse.name": "usr/bin/cat", "path": "app/fine"}
    return member.tobuf(tarfile.PAX_FORMAT)


@pytest.mark.parametrize("trick", [_bad_size(), _sparse_name()], ids=["size", "sparse name"])
def test_what_python_and_tar_read_differently_does_not_reach_the_tests(trick: bytes) -> None:
    archive = _archive(_member("app/a"))[:512] + trick + _archive(_member("usr/bin/cat"))
    with pytest.raises((ValueError, tarfile.TarError)):
        rewritten(archive, "app")


def test_the_tests_get_the_archive_that_was_written_anew() -> None:
    theirs = _archive(_member("workspace/a")) + _archive(_member("usr/bin/cat"))  # after the end of the first one
    task = read_tasks(OWN_TASKS)[0]
    found = clock.run(lambda: pack(cast("Sandbox", _Replaced(theirs)), task))
    assert not isinstance(found, str)
    assert [archive for _, archive in found] == [rewritten(theirs, "workspace")] != [theirs]


def test_accepted_members_are_written_anew() -> None:
    content, long = io.BytesIO(), "/".join(["app", "n" * 120, "m" * 120])
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, text in [(_member("app", tarfile.DIRTYPE), b""), (_member("app/a"), b"text"), (_member(long), b"")]:
            member.size, member.mode = len(text), 0o751
            tar.addfile(member, io.BytesIO(text))
        tar.addfile(_member("app/link", tarfile.SYMTYPE, "/etc"))
        tar.addfile(_member("app/hard", tarfile.LNKTYPE, "app/a"))
        tar.addfile(_member("app/pipe", tarfile.FIFOTYPE))
    made = rewritten(content.getvalue(), "app")
    assert _names(made) == ["app/", "app/a", long, "app/link", "app/hard", "app/pipe"]
    with tarfile.open(fileobj=io.BytesIO(made)) as tar:
        file = tar.extractfile("app/a")
        assert file is not None
        assert (file.read(), tar.getmember("app/a").mode) == (b"text", 0o751)


def test_deep_folders_large_headers_and_too_many_members_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = ["/".join(["a"] * (depth + 1)) for depth in range(MAX_DEPTH + 1)]
    rewritten(_archive(*(_member(path, tarfile.DIRTYPE) for path in deep[:-1])), "a")
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} folders"):
        rewritten(_archive(*(_member(path, tarfile.DIRTYPE) for path in deep)), "a")
    record = b"5 x=\n" * (1 << 20)
    extended = _member("a/x", tarfile.XHDTYPE)
    extended.size = len(record)
    with pytest.raises(ValueError, match="a header is larger"):
        rewritten(extended.tobuf(tarfile.GNU_FORMAT) + record + bytes(-len(record) % 512), "a")
    monkeypatch.setattr(artifacts, "MAX_MEMBERS", 100)
    with pytest.raises(ValueError, match="limit of"):
        rewritten(_archive(*(_member(f"a/{number}") for number in range(101))), "a")
