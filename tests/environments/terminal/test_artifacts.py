"""Archives of artifacts: an agent that is root can replace the program that packs them."""

from __future__ import annotations

import io
import tarfile
from typing import Any, cast

import pytest

from envkit import clock
from envkit.environments.terminal.formats import read_tasks
from envkit.environments.terminal.options import OWN_TASKS
from envkit.environments.terminal.verifier import pack
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
    found = clock.run(lambda: pack(cast("Sandbox", _Replaced(archive)), task, task.steps[0]))
    assert isinstance(found, str)
    assert reason in found
