"""Errors of a broken environment, in a training sandbox, in a server's sandbox, and in a server without one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import envkit
from envkit.errors import EnvError, SessionBrokenError
from tests.e2e.fleet.fleet import LOCAL, install_environment, serving
from tests.programs.program import run

ENVS = """
import anyio
import gymnasium
import envkit
from envkit.env import AsyncEnv
from envkit.spaces import Utf8Text
from envkit.types import Observation, Reset, Step

class Crash(gymnasium.Env):
    observation_space = action_space = Utf8Text(100)

    def reset(self, *, seed=None, options=None):
        return "go", {"legal_moves": ["on"]}

    def step(self, action):
        return str(1 / 0), 0.0, False, False, {}

class Player:
    def moves(self, observation):
        return ["on"]

    def answer(self, move):
        return move

class Nested(AsyncEnv):
    async def reset(self, *, seed, options):
        self._box = await anyio.to_thread.run_sync(envkit.open_sandbox)
        return Reset(Observation("go"), {})

    async def step(self, action):
        return Step(Observation("on"), 0.0, False, False, {})

    async def close(self):
        pass

def register_all():
    envkit.register("Crash-v0", "broken:Crash", expert="broken:Player")
    envkit.register("Nested-v0", "broken:Nested")
    envkit.register("NoModule-v0", "no_such_module:Env")
"""
LINES = ENVS.splitlines()
DIVIDES = next(number for number, line in enumerate(LINES, start=1) if "1 / 0" in line)
OPENS = next(number for number, line in enumerate(LINES, start=1) if "open_sandbox" in line)
PLAY = """
import sys
from envkit import clock
from envkit.config.parts import BuiltInSandboxSection
from envkit.errors import EnvkitError
from envkit.types import Task
from envkit.wiring.sandboxes.env_sandboxes import sandbox_host

async def main():
    async with sandbox_host(BuiltInSandboxSection(kind="local"), slots_per_sandbox=1) as host:
        try:
            async with host.lease(Task(sys.argv[1], 5)) as episode:
                await episode.reset()
                await episode.step("on")
        except EnvkitError as error:
            print(type(error).__name__, error, sep=": ")

clock.run(main)
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    install_environment(tmp_path / "site-packages", "broken", ENVS)
    return tmp_path / "site-packages"


def error_of(env_id: str, broken: Path) -> str:
    """Return the error that the episode host raises for an episode in a sandbox."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(broken), *sys.path])}
    command = [sys.executable, "-c", PLAY, env_id]
    done = run(command, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.bwrap
def test_training_reports_file_and_line_of_an_error_in_a_sandboxed_environment(broken: Path) -> None:
    raised = "Crash-v0 raised ZeroDivisionError in step: division by zero"
    assert error_of("Crash-v0", broken) == f"EnvError: {raised} ({broken}/broken.py:{DIVIDES})"


@pytest.mark.bwrap
def test_an_environment_that_opens_a_sandbox_inside_its_sandbox_gets_an_error_with_the_remedy(broken: Path) -> None:
    error = error_of("Nested-v0", broken)
    assert error.startswith("EnvError: Nested-v0 raised UsageError in reset: a sandbox cannot start inside another")
    assert "has neither user namespaces for bubblewrap nor a Docker daemon" in error
    assert "set sandbox.kind: none in the training file" in error
    assert error.endswith(f"({broken}/broken.py:{OPENS})")


@pytest.mark.parametrize("kind", ["none", LOCAL])
def test_a_servers_log_has_the_traceback_and_its_callers_the_files_base_name(
    kind: str, tmp_path: Path, broken: Path
) -> None:
    one_sandbox = () if kind == "none" else ("envs.sandboxes=1", "envs.warm=0")
    with (
        serving(kind, tmp_path, *one_sandbox, environments=broken) as gateway,
        envkit.make("Crash-v0", url=gateway.url) as env,
    ):
        env.reset(seed=5)
        with pytest.raises(EnvError) as raised:
            env.step("on")
        with pytest.raises(SessionBrokenError) as after:
            env.step("off")
    message = f"Crash-v0 raised ZeroDivisionError in step: division by zero (broken.py:{DIVIDES})"
    assert (str(raised.value), raised.value.trace) == (message, "")
    assert message in str(after.value)
    log = gateway.log.read_text()
    error = rf'\({broken}/broken\.py:{DIVIDES}\)\nseed 5, options {{}}\nTraceback(.*\n)+?  File "{broken}/broken\.py"'
    assert re.search(error, log)
    assert log.count("Crash-v0 raised") == 1
