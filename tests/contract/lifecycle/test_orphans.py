"""One promise for every kind of sandbox: whatever its programs leave behind is gone with it, however it ends."""

from __future__ import annotations

from pathlib import Path

from tests.contract.kinds import Kind, groups_of, run, sleepers, traces, until
from tests.contract.lifecycle.owners import OWNERS_TOGETHER, Owners
from tests.contract.lifecycle.test_owner import left_by
from tests.contract.untidy import WAYS, leave_everything

pytestmark = OWNERS_TOGETHER


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


def test_nor_after_its_owner_was_killed_and_another_has_come(owners: Owners, kind: Kind, marker: str) -> None:
    async def clear_away(owner: int, groups: set[Path]) -> None:
        async with kind.backend():
            await until(lambda: not sleepers(marker))
            assert left_by(owner) == []
            assert [group for group in groups if group.exists()] == []

    with owners.start("untidy", kind, marker) as owner:
        assert owner.lines.readline() == "ready\n"
        found = sleepers(marker)
        assert len(found) >= 20
        groups = {group for pid in found for group in groups_of(pid)}
        owner.kill()
        run(lambda: clear_away(owner.pid, groups))
