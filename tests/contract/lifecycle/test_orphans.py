"""One promise for every kind of sandbox: whatever its programs leave behind is gone once it was stopped."""

from __future__ import annotations

from tests.contract.kinds import Kind, groups_of, run, sleepers, traces
from tests.contract.untidy import WAYS, leave_everything


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
