"""One promise for every kind of sandbox: its cause tells what its own programs did from what was done from outside."""

from __future__ import annotations

import os
import signal

import anyio
import pytest

from envkit.errors import MissingFileError
from envkit.protocols import Sandbox
from envkit.types import Cause, CauseKind
from tests.contract.kinds import KINDS, Kind, agent_above, run, sleepers, until

_HOG = "head -c 600000000 /dev/zero | tail -n 1"
bounded = pytest.mark.parametrize(
    "name",
    [
        pytest.param("local", marks=[pytest.mark.bwrap, pytest.mark.limits]),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
"""The kinds whose memory has a limit."""


async def cause_of(sandbox: Sandbox) -> tuple[CauseKind, bool]:
    """Return kind and `by_agent` of the end of a sandbox, which comes within 10 s."""
    with anyio.fail_after(10):
        found: Cause = await sandbox.wait()
    return found.kind, found.by_agent


async def is_missing(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.read(path)
    except MissingFileError:
        return True
    return False


async def agent_of(sandbox: Sandbox, marker: str) -> int:
    """Return the process of the agent of a sandbox, whose command sleeps for `marker` or is to be one that does."""
    await until(lambda: bool(sleepers(marker)))
    return agent_above(sleepers(marker)[0])


def test_a_signal_from_outside_is_not_by_the_agent(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.sandbox("sleep", marker) as sandbox:
            os.kill(await agent_of(sandbox, marker), signal.SIGTERM)
            assert await cause_of(sandbox) == (CauseKind.KILLED, False)

    run(main)


def test_a_time_to_live_that_is_over_ends_everybody_and_is_not_by_the_agent(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.sandbox("sleep", marker, ttl_s=0.5) as sandbox:
            assert await cause_of(sandbox) == (CauseKind.EXPIRED, False)
            await sandbox.stop()
            assert sleepers(marker) == []

    run(main)


@bounded
def test_a_command_at_its_own_limit_of_memory_is_by_the_agent_also_after_a_kill_that_was_survived(name: str) -> None:
    async def main() -> None:
        command = f"until [ -e go ]; do sleep 0.01; done; {_HOG}; kill -9 $$"
        async with KINDS[name].sandbox("sh", "-c", command, memory_mib=64) as sandbox:
            await sandbox.exec(["sh", "-c", f"{_HOG}; true"], timeout_s=20)
            await anyio.sleep(1.5)  # process 1 looks at the limit twice a second
            await sandbox.write("go", b"")
            assert await cause_of(sandbox) == (CauseKind.OUT_OF_MEMORY, True)

    run(main)


@bounded
def test_a_kill_from_outside_after_a_background_program_ran_out_of_memory_is_not_by_the_agent(
    name: str, marker: str
) -> None:
    async def main() -> None:
        async with KINDS[name].sandbox("sleep", marker, memory_mib=128) as sandbox:
            agent = await agent_of(sandbox, marker)
            await sandbox.shell().run(f"({_HOG}; touch done) > hog.out 2>&1 &", timeout_s=20)
            with anyio.fail_after(30):
                while await is_missing(sandbox, "done"):  # noqa: ASYNC110 - it is about a program that tells nobody
                    await anyio.sleep(0.05)
            await anyio.sleep(2.5)  # process 1 counts OOM kills twice a second
            os.kill(agent, signal.SIGKILL)
            assert await cause_of(sandbox) == (CauseKind.KILLED, False)

    run(main)
