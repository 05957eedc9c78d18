"""Episodes in real sandboxes with real servers: they play as in this process, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio
import pytest

from envkit.config.parts import BuiltInSandboxSection
from envkit.protocols import EnvHost
from envkit.types import Task
from envkit.wiring import environments
from envkit.wiring.sandboxes.env_sandboxes import sandbox_host
from tests.contract.kinds import run

Kind: TypeAlias = Literal["local", "process"]


@pytest.fixture(params=[pytest.param("local", marks=pytest.mark.bwrap), "process"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return "local" if request.param == "local" else "process"


def section(kind: Literal["local", "process", "none"], count: int = 1, **keys: Any) -> BuiltInSandboxSection:
    return BuiltInSandboxSection(kind=kind, count=count, **keys)


async def play(host: EnvHost, task: Task) -> list[str]:
    """Play a task with fixed moves, and return the observations."""
    async with host.lease(task) as episode:
        seen = [(await episode.reset()).observation.text]
        for move in ("down", "right", "down", "left", "up", "right", "down", "nonsense"):
            step = await episode.step(f"<answer>{move}</answer>")
            seen.append(f"{step.observation.text} {step.reward}")
            if step.ended:
                break
        return seen


def children() -> set[str]:
    """The processes that this one has started; other tests may still use some, such as a vLLM server."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def test_an_episode_in_a_sandbox_is_the_same_as_in_this_process(kind: Kind) -> None:
    async def main() -> None:
        tasks = [Task("FrozenLake-v0", seed) for seed in range(3)]
        async with environments.slots(1) as here:
            expected = [await play(here, task) for task in tasks]
        async with sandbox_host(section(kind), slots_per_sandbox=2) as host:
            assert [await play(host, task) for task in tasks] == expected

    run(main)


def test_a_host_that_is_cancelled_during_episodes_leaves_nothing(kind: Kind) -> None:
    before = children()

    async def main() -> None:
        played = anyio.Event()

        async def keep_playing(host: EnvHost, seed: int) -> None:
            while True:
                await play(host, Task("FrozenLake-v0", seed))
                played.set()

        with anyio.CancelScope() as scope:
            async with sandbox_host(section(kind, 2), slots_per_sandbox=2) as host, anyio.create_task_group() as tasks:
                for seed in range(6):
                    tasks.start_soon(keep_playing, host, seed)
                await played.wait()
                scope.cancel()
                await anyio.sleep_forever()
        assert children() == before

    run(main)


def test_without_sandboxes_episodes_are_played_in_this_process() -> None:
    before = children()

    async def main() -> None:
        reported: list[str] = []
        async with sandbox_host(section("none", 2), slots_per_sandbox=3, announce=reported.append) as host:
            assert host.capacity == 6
            assert len(await play(host, Task("FrozenLake-v0", 1))) > 1
            assert children() == before
        assert reported == ["sandbox: none, 6 episodes at once in this process"]

    run(main)


NO_DAEMON = "/run/no-docker.sock"
PLAY = """
import sys, envkit
from envkit import clock
from envkit.config.parts import BuiltInSandboxSection
from envkit.errors import EnvkitError
from envkit.types import Task
from envkit.wiring.sandboxes.env_sandboxes import sandbox_host

async def main():
    section = BuiltInSandboxSection(kind=sys.argv[1], count=1)
    try:
        async with sandbox_host(section, slots_per_sandbox=1, announce=print) as host:
            async with host.lease(Task(sys.argv[2], 5)) as episode:
                print((await episode.reset()).observation.text)
    except EnvkitError as error:
        print(error)

"""
PACKAGE = """
import gymnasium
from envkit.registry import register
from envkit.spaces import Utf8Text

class Echo(gymnasium.Env):
    observation_space = action_space = Utf8Text(100)

    def reset(self, *, seed=None, options=None):
        return f"hello from outside, {seed}", {}

    def step(self, action):
        return action, 0.0, False, False, {}

def register_all():
    register("Outside-v0", "outside:Echo")
"""


def script(
    folder: Path, kind: str, env_id: str, *, first: str = "", path: str | None = None, imports: str = ""
) -> list[str]:
    """Run a script that plays, and return the lines that it wrote."""
    (folder / "script.py").write_text(f"{PLAY}{first}\nclock.run(main)\n")
    done = subprocess.run(
        [sys.executable, "script.py", kind, env_id],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"] if path is None else path,
            "HOME": str(folder),
            "PYTHONPATH": imports,
            "DOCKER_HOST": f"unix://{NO_DAEMON}",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout.splitlines()


def install(folder: Path) -> None:
    """Install the package `outside` in a folder."""
    metadata = folder / "outside-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "outside.py").write_text(PACKAGE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[envkit.envs]\noutside = outside:register_all\n")


@pytest.mark.bwrap
def test_an_environment_of_an_installed_package_is_played_in_a_sandbox_whose_kind_is_announced(tmp_path: Path) -> None:
    package = tmp_path / "site-packages"
    install(package)
    played = script(tmp_path, "auto", "Outside-v0", imports=str(package))
    assert played == ["sandbox: bubblewrap, 1 sandbox", "hello from outside, 5"]


def test_an_environment_that_only_a_script_registers_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(PACKAGE)
    (reported,) = script(tmp_path, "process", "Outside-v0", first="import outside; outside.register_all()")[1:]
    assert reported.startswith(
        "no environment is called 'Outside-v0'; it is registered only in this process, not in the sandbox"
    )
    for remedy in (
        "entry point group 'envkit.envs'",
        "envkit image build games --with ./PACKAGE",
        "sandbox.kind: none",
    ):
        assert remedy in reported


def test_without_bubblewrap_plain_processes_are_used_and_the_reason_announced(tmp_path: Path) -> None:
    announced = script(tmp_path, "auto", "FrozenLake-v0", path=str(tmp_path))[0]
    reason = "because bubblewrap is not installed (apt install bubblewrap); no Docker daemon answers"
    assert announced.startswith(f"sandbox: plain child processes, 1 sandbox, {reason}")
