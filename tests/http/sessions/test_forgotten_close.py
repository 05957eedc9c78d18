"""A program that does not close its environment still exits."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import anyio

from envkit import clock
from tests.http.envs import serving, slots

PROGRAM = """
import sys, envkit
env = envkit.make("Count-v0", url=sys.argv[1])
env.reset(seed=0)
env.step("x")
sys.exit(7)
"""


def test_a_program_ends_with_its_own_exit_code() -> None:
    async def main() -> tuple[int, str]:
        command = [sys.executable, "-c", PROGRAM, ""]
        async with slots() as host, serving(host) as address:
            command[-1] = address
            run = partial(subprocess.run, command, capture_output=True, text=True, timeout=120, check=False)
            done = await anyio.to_thread.run_sync(run)
        return done.returncode, done.stderr

    assert clock.run(main) == (7, "")
