"""One promise for every kind of sandbox: a bound that is given holds, or is refused."""

from __future__ import annotations

import os

import pytest

from envkit.errors import SandboxRefusedError
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from tests.contract.kinds import ISOLATING, OF_HOST_IN_TMP, Kind, run

MAKE = """
import sys
made = 0
try:
    for made in range(30_000):
        open(sys.argv[1] + "/%d" % made, "w").close()
except OSError as error:
    print(made, error.strerror)
else:
    print("all")
"""
BOUNDS: list[tuple[str, dict[str, float], str]] = [
    ("cpu", {"cpus": 1e-9}, "cpus=1e-09 is refused: it must be in [0.01, 1048576]"),
    ("cpu", {"cpus": float("inf")}, "cpus=inf is refused: it must be in [0.01, 1048576]"),
    ("disk", {"disk_mib": 10**9}, "disk_mib=1000000000 is refused: the machine has"),
    ("memory", {"memory_mib": 10**9}, "memory_mib=1000000000 is refused: the machine has"),
]
"""Each with what the backend must be able to limit, and why it is refused."""


@ISOLATING
def test_each_place_of_16_mib_holds_16_thousand_files(kind: Kind) -> None:
    async def main() -> None:
        async with kind.sandbox(disk_mib=16) as sandbox:
            if isinstance(sandbox, AgentSandbox) and "inodes" in sandbox.unenforced and os.geteuid() != 0:
                pytest.skip("the number of files cannot be limited here (needs root)")
            for place in ("/workspace", "/tmp", "/dev/shm"):
                made = await sandbox.exec([kind.python, "-c", MAKE, place], timeout_s=60)
                # With the folder itself.
                there = 1 + len(OF_HOST_IN_TMP if (kind.name, place) == ("local", "/tmp") else [])
                assert made.stdout == f"{(1 << 14) - there} No space left on device\n", place

    run(main)


def test_a_bound_that_cannot_be_held_is_refused(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            for limit, bound, reported in BOUNDS:
                with pytest.raises(SandboxRefusedError) as refusal:
                    await backend.start(kind.spec(**bound))
                # A backend that cannot hold a bound at all does not look at its value.
                ((name, value),) = bound.items()
                expected = reported if backend.capabilities()[limit] else f"{name}={value} is refused: "
                assert refusal.value.cause.detail.startswith(expected)

    run(main)
