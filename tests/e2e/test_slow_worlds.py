"""A gateway's worlds that take long: a step may take as long as the limits say, and costs nobody a box."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.fleet import install_world

WORLD = """
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
        elif action == "wait":
            await anyio.sleep(1000)
        return Step(Observation(action), 0.0, False, False, {})

    async def close(self):
        pass

def register_all():
    register("Slow-v0", "slow_world:Slow")
"""
PLAY = """
from envkit import clock
from envkit.config.serving import ServeConfig
from envkit.errors import DeadlineError
from envkit.types import Task
from envkit.wiring.gateway import open_fleet

CONFIG = ServeConfig.model_validate({
    "backend": "process",
    "listen": {"port": 0},
    "envs": {"boxes": 1, "capacity": 8, "spares": 0, "own_boxes": 0},
    "silence": {"interval_s": 0.4, "suspect_s": 0.8, "lost_s": 1.5},
    "limits": {"step_timeout_s": 6},
})

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
        print("boxes lost:", fleet.hosts[0].lost)

clock.run(main)
"""


def test_a_step_may_take_as_long_as_the_limits_say_and_silences_no_box(tmp_path: Path) -> None:
    install_world(tmp_path / "world", "slow_world", WORLD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "world"), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", PLAY], env=environment, capture_output=True, text=True, timeout=55, check=False
    )
    computed, deadline, lost = done.stdout.splitlines() or [done.stderr, "", ""]
    assert computed == "compute {}"
    assert "within 6 s" in deadline
    assert lost == "boxes lost: 0"
