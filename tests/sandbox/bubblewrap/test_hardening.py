"""What is bounded, hidden and cleared away of bubblewrap sandboxes alone.

What hostile programs try in every kind of sandbox is in ``tests/contract/limits/test_hardening.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envkit.sandbox.bubblewrap.backend import LocalBackend
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


def test_a_hostile_sandbox_is_not_shown_what_is_importable_here() -> None:
    reported = attempt(f"ls {Path(__file__).parents[3]} {Path(sys.prefix, 'lib')}")
    assert reported.count("No such file") == 2
