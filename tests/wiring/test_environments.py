"""Environments by name: options, copies in processes, and errors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import anyio
import gymnasium
import pytest
from gymnasium.vector import VectorEnv

import envkit
from envkit import registry
from envkit.env import AsyncEnv
from envkit.environments.code import Code
from envkit.environments.code.grading import SOLUTION
from envkit.environments.code.tasks import Problem
from envkit.environments.tasks.players import write_commands
from envkit.environments.tools import write_call
from envkit.errors import ConfigError, EnvError, OptionError, StepOrderError, UnreachableError, UsageError
from envkit.protocols import Judge, SandboxPool
from envkit.spaces import Utf8Text
from envkit.types import Info, Observation, Options, Reset, Step, Task
from envkit.wiring import environments

MOVES = ("<answer>up</answer>", "<answer>right</answer>", "<answer>down</answer>", "nothing")


class Room(gymnasium.Env[str, str]):
    """An environment that does not check the type of its option `size`."""

    def __init__(self, size: int = 3, doors: int = 1) -> None:
        self.observation_space = self.action_space = Utf8Text(100)
        if size < doors:
            raise OptionError("doors", f"must fit into {size}")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return "a room", {}


@pytest.fixture
def room() -> str:
    return envkit.register("Room-v0", Room).id


def test_an_unknown_option_is_named_with_the_nearest_one(room: str) -> None:
    with pytest.raises(OptionError, match=r"^sise: no such option; did you mean 'size'"):
        envkit.make(room, sise=3)
    with pytest.raises(OptionError, match=r"^doors: must fit into 3"):
        envkit.make(room, doors=4)


def test_the_catalogue_is_registered_only_for_an_id_that_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SPECS", {})
    room = registry.register("Room-v0", Room)
    assert environments.find("Room-v0") is room
    assert not registry.is_registered("FrozenLake-v0")
    assert environments.find("FrozenLake-v0").replayable
    assert registry.is_registered("FrozenLake-v0")


def test_an_error_of_the_environment_is_unchanged_and_attributed_in_slots(room: str) -> None:
    with pytest.raises(TypeError, match="not supported between"):
        envkit.make(room, size="big")

    async def main() -> None:
        async with environments.slots(1, {"size": "big"}) as host, host.lease(Task(room, 0)):
            pass

    with pytest.raises(EnvError, match=r"^Room-v0 raised TypeError in __init__: '<' not supported between"):
        anyio.run(main)


@pytest.mark.parametrize("count", [0, -1, 2.0, "3", None])
def test_an_invalid_number_of_copies_is_rejected(count: Any) -> None:
    with pytest.raises(ConfigError, match=f"num_envs: must be an integer from 1, got {count!r}"):
        envkit.make_vec("FrozenLake-v0", count)


class Waiting(AsyncEnv):
    """Counts its environments that are open."""

    is_open: ClassVar[list[int]] = []

    def __init__(self, sandboxes: SandboxPool | None = None, judge: Judge | None = None, size: int = 3) -> None:
        if size < 1:
            raise OptionError("size", "must be at least 1")
        self.is_open.append(size)
        self._size = size

    async def reset(self, *, seed: int, options: Options) -> Reset:
        return Reset(Observation("a room"), {})

    async def step(self, action: str) -> Step:
        raise NotImplementedError

    async def close(self) -> None:
        if self._size in self.is_open:
            self.is_open.remove(self._size)


@pytest.mark.parametrize("needs", [(), ("sandbox",)])
def test_the_options_of_an_asynchronous_environment_are_checked_when_it_is_made(needs: Sequence[str]) -> None:
    env_id = envkit.register(f"Waiting{len(needs)}-v0", Waiting, needs=needs).id
    with pytest.raises(OptionError, match=r"^size: must be at least 1"):
        envkit.make(env_id, backend="process", size=0)
    with pytest.raises(OptionError, match=r"^sise: no such option; did you mean 'size'"):
        envkit.make(env_id, backend="process", sise=1)
    with closing(envkit.make(env_id, backend="process", size=5)) as env:
        assert Waiting.is_open == []
        env.reset(seed=0)
        assert Waiting.is_open == [5]
    assert Waiting.is_open == []


def test_a_missing_judge_is_named_when_the_environment_is_made() -> None:
    env_id = envkit.register("Judged-v0", Waiting, needs=("judge",)).id
    with pytest.raises(UsageError, match=r"^Judged-v0 needs a judge model, .*judge= of envkit.make"):
        envkit.make(env_id)
    envkit.make(env_id, judge="some/judge@http://127.0.0.1:1").close()


def problem(seed: int) -> Problem:
    return Code.task_of(seed, {"level": 1}).problem


def sandboxes() -> int:
    """Return the number of running processes of bubblewrap that descend from this process."""
    lines = subprocess.run(["ps", "-eo", "pid=,ppid=,stat=,comm="], check=True, capture_output=True, text=True).stdout
    found = {
        int(pid): (int(parent), stat, name)
        for pid, parent, stat, name in (line.split(None, 3) for line in lines.splitlines())
    }

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in found and is_ours(found[pid][0]))

    return sum(name == "bwrap" and "Z" not in stat and is_ours(pid) for pid, (_, stat, name) in found.items())


@pytest.mark.bwrap
def test_copies_with_sandboxes_play_one_after_another_and_leave_no_sandbox() -> None:
    with closing(envkit.make_vec("Code-v0", 2, mode="sync", backend="local")) as vector:
        vector.reset(seed=1, options={"mode": "tools", "level": 1})
        assert sandboxes() >= 2
        solutions = [str(problem(seed).solution).encode() for seed in (1, 2)]
        solve = [write_call("bash", command=next(write_commands(SOLUTION, one))) for one in solutions]
        assert list(vector.step(solve)[1]) == [0.0, 0.0]
        _, rewards, terminated, _, _ = vector.step([write_call("submit")] * 2)
        assert (list(rewards), list(terminated)) == ([1.0, 1.0], [True, True])
    assert sandboxes() == 0


def test_url_none_is_the_default() -> None:
    assert type(envkit.make_vec("FrozenLake-v0", 2, url=None)) is type(envkit.make_vec("FrozenLake-v0", 2))
    with pytest.raises(UnreachableError):
        envkit.make_vec("FrozenLake-v0", 2, url="http://127.0.0.1:1")


def _vector(**options: Any) -> closing[VectorEnv[Any, Any, Any]]:
    return closing(envkit.make_vec("FrozenLake-v0", 2, mode="async", **options))


@contextmanager
def _raises_from_a_process(kind: type[Exception], match: str) -> Iterator[None]:
    with pytest.warns(UserWarning, match="ERROR"), pytest.raises(kind, match=match):
        yield


def test_errors_of_a_process_keep_their_class() -> None:
    with _vector() as vector, _raises_from_a_process(OptionError, r"^slip: .* got '5%'$"):
        vector.reset(options={"slip": "5%"})
    with _vector() as vector, _raises_from_a_process(StepOrderError, "^step before reset"):
        vector.step(MOVES[:2])
    with _vector(action="index") as vector:
        vector.reset(seed=0)
        with _raises_from_a_process(UsageError, "^an action must be an integer, got 'nothing'"):
            vector.step(("nothing", "nothing"))
