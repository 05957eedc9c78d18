"""One promise for every kind of sandbox: whatever its programs leave behind is gone with it, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.contract.kinds import Kind, groups_of, run, sleepers, traces, until
from tests.contract.lifecycle.test_owner import left_by
from tests.contract.untidy import WAYS, leave_everything
from tests.programs.program import Program

# Starts a sandbox of the given kind, leaves everything in it, prints a line, and waits.
OWNER = """
import sys, anyio
from tests.contract.kinds import KINDS
from tests.contract.untidy import leave_everything

async def main():
    kind = KINDS[sys.argv[1]]
    async with kind.sandbox() as sandbox:
        await leave_everything(sandbox, kind.python, sys.argv[2])
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


def test_nothing_of_fifty_ways_to_leave_something_is_left_of_a_stopped_sandbox(kind: Kind, marker: str) -> None:
    assert len(WAYS) == 50

    async def main() -> None:
        async with kind.backend() as backend:
            empty = traces()
            sandbox = await backend.start(kind.spec())
            await leave_everything(sandbox, kind.python, marker)
            found = sleepers(marker)
            assert len(found) >= 20
            groups = {group for pid in found for group in groups_of(pid)}
            await sandbox.stop()
            assert sleepers(marker) == []
            assert [group for group in groups if group.exists()] == []
            assert traces() == empty

    run(main)


def test_nor_after_its_owner_was_killed_and_another_has_come(kind: Kind, marker: str) -> None:
    arguments = [sys.executable, "-c", OWNER, kind.name, marker]

    async def clear_away(owner: int, groups: set[Path]) -> None:
        async with kind.backend():
            await until(lambda: not sleepers(marker))
            assert left_by(owner) == []
            assert [group for group in groups if group.exists()] == []

    with Program(arguments, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        found = sleepers(marker)
        assert len(found) >= 20
        groups = {group for pid in found for group in groups_of(pid)}
        owner.kill()
    run(lambda: clear_away(owner.pid, groups))
