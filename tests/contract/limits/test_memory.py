"""One promise for every kind of sandbox that bounds memory: a grader finds some, whatever the agent leaves in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from envkit.sandbox.agent_client.sandbox import AgentSandbox
from tests.contract.kinds import ISOLATING, LOCAL, Kind, run

EVIDENCE = Path(__file__).parents[3] / "benchmarks" / "evidence" / "memory_without_owner.py"
MEMORY_MIB = 256  # of which the agent has 224

LIBC = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
def share(mib):
    number = libc.shmget(0, mib << 20, 0o1600)
    address = libc.shmat(number, None, 0)
    ctypes.memset(address, 1, mib << 20)
    libc.shmdt(ctypes.c_void_p(address))
"""
SHARE_ALL = f"""{LIBC}
for count in range(40):  # 320 MiB
    share(8)
"""
TAKE = "bytearray(int(__import__('sys').argv[1]) << 20)"


@asynccontextmanager
async def sandbox_of(kind: Kind) -> AsyncIterator[AgentSandbox]:
    async with kind.backend() as backend:
        if not backend.capabilities()["memory"]:
            pytest.skip("memory is not bounded here")
        sandbox = await backend.start(kind.spec(memory_mib=MEMORY_MIB))
        assert isinstance(sandbox, AgentSandbox)
        if "memory_reserve" in sandbox.unenforced:
            pytest.skip("no memory can be reserved here")
        yield sandbox


@pytest.mark.parametrize("kind", LOCAL, indirect=True)
def test_a_grader_runs_in_a_sandbox_full_of_memory_that_no_process_owns(kind: Kind, tmp_path: Path) -> None:
    kind.require("memory", "pids", "cpu", "uid")
    options = ["--short", "--within-s", "10", "--kind", kind.name, "--folder", str(tmp_path)]
    command = [sys.executable, str(EVIDENCE), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    assert done.stdout.splitlines()[-1:] == ["the grader ran within 10 s in 3 of 3; sandboxes lost: none"], done.stderr


@ISOLATING
def test_a_sandbox_outlives_programs_that_find_no_memory_left(kind: Kind) -> None:
    async def main() -> None:
        async with sandbox_of(kind) as sandbox:
            filled = await sandbox.exec([kind.python, "-c", SHARE_ALL], timeout_s=20)
            assert filled.is_out_of_memory
            for _ in range(3):
                starved = await sandbox.exec([kind.python, "-c", TAKE, "16"], timeout_s=20)
                assert (starved.exit_code, starved.is_out_of_memory) == (-9, True)
            graded = await sandbox.exec([kind.python, "-c", TAKE, "16"], user="grader", timeout_s=20)
            assert (graded.exit_code, graded.stderr) == (0, "")

    run(main)


@ISOLATING
def test_the_agents_programs_cannot_use_an_eighth_of_the_memory_and_a_grader_can(kind: Kind) -> None:
    async def main() -> None:
        async with sandbox_of(kind) as sandbox:
            take = [kind.python, "-c", TAKE, "222"]
            assert (await sandbox.exec(take, timeout_s=20)).is_out_of_memory
            assert (await sandbox.exec(take, user="grader", timeout_s=20)).exit_code == 0

    run(main)
