"""One promise for every kind of sandbox: what an agent closes to itself hinders nobody who takes its files out."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.protocols import Sandbox
from tests.contract.kinds import Kind, run
from tests.contract.shared import AnySandbox, Shared

CLOSE = """
mkdir -p tree/no/deep tree/unlisted && echo in > tree/no/deep/file && echo seen > tree/unlisted/file &&
echo secret > tree/no/closed && chmod 0 tree/no/closed tree/no/deep tree/no && chmod 300 tree/unlisted
"""
MODES = "stat -c %a tree/no tree/unlisted; chmod 700 tree/no; stat -c %a tree/no/deep tree/no/closed; chmod 0 tree/no"


async def sh(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(["sh", "-c", command], timeout_s=60)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_download_holds_what_is_in_closed_folders_and_leaves_them_closed(shared: Shared, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sh(sandbox, CLOSE)
        await sandbox.download("tree", tmp_path / "copy")
        copy = tmp_path / "copy"
        assert (copy / "no" / "deep" / "file").read_text() == "in\n"
        assert (copy / "no" / "closed").read_text() == "secret\n"
        assert (copy / "unlisted" / "file").read_text() == "seen\n"
        await sandbox.download("tree/no", tmp_path / "alone")
        assert (tmp_path / "alone" / "closed").read_text() == "secret\n"
        assert await sh(sandbox, MODES) == "0\n300\n0\n0\n"

    shared.run(main)


def test_a_snapshot_holds_what_is_in_closed_folders_and_leaves_them_closed_here_and_there(kind: Kind) -> None:
    if kind.name == "process":
        pytest.skip("plain processes have no snapshots")

    async def main() -> None:
        async with kind.backend() as backend:
            sandbox = await backend.start(kind.spec())
            await sh(sandbox, CLOSE)
            again = await backend.restore(await sandbox.snapshot(), kind.spec())
            for one in (sandbox, again):
                assert await sh(one, MODES) == "0\n300\n0\n0\n"
                await sh(one, "chmod 700 tree/no tree/no/deep; chmod 600 tree/no/closed")
                assert await sh(one, "cat tree/no/deep/file tree/no/closed tree/unlisted/file") == "in\nsecret\nseen\n"

    run(main)
