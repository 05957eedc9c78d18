"""What is bounded, hidden and cleared away of bubblewrap sandboxes alone.

What hostile programs try in every kind of sandbox is in ``tests/contract/limits/test_hardening.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from envkit.runs import owners
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.host import cgroups
from envkit.types import SandboxSpec
from tests.contract.kinds import run

pytestmark = [
    pytest.mark.bwrap,
    pytest.mark.skipif(not all(LocalBackend().capabilities().values()), reason="not everything is enforced here"),
]

HOSTILE = SandboxSpec(untrusted=True, memory_mib=256, pids=64, disk_mib=32)


def attempt(command: str, spec: SandboxSpec = HOSTILE) -> str:
    """Run a line of shell in a sandbox of its own, and return all that it wrote."""
    written: list[str] = []

    async def main() -> None:
        async with LocalBackend() as backend:
            result = await (await backend.start(spec)).exec(["sh", "-c", command], timeout_s=20)
            written.append(result.stdout + result.stderr)

    run(main)
    return written[0]


def groups(owner: str) -> set[str]:
    return {group.name for place in cgroups.find().parents.values() for group in place.glob(f"{owner}-*")}


def test_all_that_can_be_written_is_bounded_together() -> None:
    fill = "for place in /tmp /workspace /dev/shm; do head -c 200000000 /dev/zero > $place/file; done 2>/dev/null; "
    reported = attempt(f"{fill} du -cm /tmp/file /workspace/file /dev/shm/file", spec=SandboxSpec(memory_mib=256))
    assert int(reported.split()[-2]) == 3 * 64


def test_a_hostile_sandbox_is_not_shown_what_is_importable_here() -> None:
    reported = attempt(f"ls {Path(__file__).parents[3]} {Path(sys.prefix, 'lib')}")
    assert reported.count("No such file") == 2


def test_of_a_sandbox_that_forks_without_end_nothing_is_left(sleepers: Callable[[], int], marker: str) -> None:
    async def main() -> None:
        us = owners.owner_name(os.getpid())
        before = groups(us)
        async with LocalBackend() as backend:
            bomb = f"bomb() {{ sleep {marker} & bomb & bomb & wait; }}; bomb"
            sandbox = await backend.start(HOSTILE)
            with anyio.move_on_after(1):
                await sandbox.exec(["bash", "-c", bomb], timeout_s=20)
            await sandbox.stop()
            assert sleepers() == 0
        assert groups(us) <= before

    run(main)
