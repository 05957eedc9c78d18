"""Slow environments of a gateway: a step may take up to its limit without the loss of its sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.fleet.fleet import install_environment

pytestmark = pytest.mark.slow

ENVIRONMENT = """
import ctypes
import time
import anyio
from envkit.env import AsyncEnv
from envkit.registry import register
from envkit.types import Observation, Reset, Step

class Slow(AsyncEnv):
    async def reset(self, *, seed, options):
        return Reset(Observation("start"), {})

    async def step(self, action):
        if action == "compute":
            time.sleep(3.5)
        elif action == "hold":
            ctypes.PyDLL(None).sleep(3)  # without releasing the GIL
        elif action == "wait":
            await anyio.sleep(1000)
        return Step(Observation(action), 0.0, False, False, {})

    async def close(self):
        pass

def register_all():
    register("Slow-v0", "slow_env:Slow")
"""
SERVE = """
import sys
from envkit import clock
from envkit.config.serving import ServeConfig
from envkit.errors import DeadlineError, SandboxLostError
from envkit.types import Task
from envkit.wiring.gateway.gateway import open_fleet

CONFIG = ServeConfig.model_validate({
    "backend": "process",
    "listen": {"port": 0},
    "envs": {"sandboxes": 1, "capacity": 8, "warm": 0},
    "liveness": {"lost_s": float(sys.argv[1])},
    "limits": {"step_timeout_s": 6},
})
"""
PLAY = """
async def main():
    async with open_fleet(CONFIG, lambda line: None) as fleet:
        async with fleet.host.lease(Task("Slow-v0", 1)) as slow, fleet.host.lease(Task("Slow-v0", 2)) as other:
            for episode in (slow, other):
                await episode.reset()
            print((await slow.step("compute")).observation.text, (await other.step("on")).info)
            try:
                await slow.step("wait")
            except DeadlineError as error:
                print(error)
        print("sandboxes lost:", fleet.hosts[0].lost)

clock.run(main)
"""
HOLD = """
async def main():
    async with open_fleet(CONFIG, lambda line: None) as fleet:
        async with fleet.host.lease(Task("Slow-v0", 1)) as slow:
            await slow.reset()
            try:
                await slow.step("hold")
            except SandboxLostError as error:
                print(error)

clock.run(main)
"""


def played(tmp_path: Path, script: str, lost_s: float) -> list[str]:
    """Return the lines that `script` prints with a server whose sandboxes are lost after `lost_s`."""
    install_environment(tmp_path / "site-packages", "slow_env", ENVIRONMENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site-packages"), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", SERVE + script, str(lost_s)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_step_up_to_the_limit_does_not_lose_its_sandbox(tmp_path: Path) -> None:
    computed, deadline, lost = played(tmp_path, PLAY, lost_s=3.0)
    assert computed == "compute {}"
    assert "within 6 s" in deadline
    assert lost == "sandboxes lost: 0"


def test_an_environment_that_holds_the_gil_longer_than_lost_s_is_lost(tmp_path: Path) -> None:
    (line,) = played(tmp_path, HOLD, lost_s=1.5)
    assert line.endswith("env server did not answer for 1.5 s; the previous worker was lost during the same step")
