"""One promise for every kind of sandbox: files that the agent makes inaccessible do not stop a copy of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.errors import MissingFileError
from tests.contract.kinds import ISOLATING, Kind, run
from tests.contract.shared import AnySandbox, Shared, sh

CLOSE = """
mkdir -p tree/no/deep tree/unlisted && echo in > tree/no/deep/file && echo secret > tree/closed &&
echo seen > tree/open && chmod 0 tree/closed tree/no && chmod 300 tree/unlisted
"""


@ISOLATING
def test_a_download_leaves_out_what_the_agent_cannot_read(shared: Shared, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sh(sandbox, CLOSE)
        await sandbox.download("tree", tmp_path / "copy")
        assert [path.name for path in (tmp_path / "copy").iterdir()] == ["open"]
        assert await sh(sandbox, "stat -c %a tree/closed tree/no; chmod 700 tree/no") == "0\n0\n"

    shared.require("uid")  # root reads everything
    shared.run(main)


@ISOLATING
def test_a_snapshot_leaves_out_what_the_agent_cannot_read_and_what_a_grader_keeps_closed(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            sandbox = await backend.start(kind.spec())
            await sh(sandbox, CLOSE)
            grades = (f"{sandbox.grader_home}/key", "/tmp/grade") if backend.capabilities()["uid"] else ()
            for file in grades:
                await sandbox.write(file, b"42", user="grader")
            again = await backend.restore(await sandbox.snapshot(), kind.spec())
            assert await sh(again, "ls tree") == "open\n"
            for file in grades:
                with pytest.raises(MissingFileError):
                    await again.read(file, user="grader")

    run(main)
