"""Errors of environments and their texts, and fair turns for the sessions of a server."""

from __future__ import annotations

import inspect
import itertools
import json
import pickle
from contextlib import closing
from typing import Any

import anyio
import anyio.lowlevel
import gymnasium
import pytest

import envkit
from envkit import clock
from envkit.env import AsyncEnv, AsyncEpisode, GymEpisode
from envkit.errors import (
    CapacityError,
    ConfigError,
    EnvError,
    EnvkitError,
    MissingFileError,
    OptionError,
    RefusedFileError,
    SandboxLostError,
    SandboxStartError,
    StepOrderError,
    UnreachableError,
    UsageError,
    from_problem,
    to_problem,
)
from envkit.http.sessions.table import SessionTable
from envkit.local_host import SlotHost
from envkit.spaces import Utf8Text
from envkit.types import Info, Observation, Options, Reset, Step, Task
from envkit.wiring.blocking_env import BlockingEnv
from tests.causes import cause
from tests.http.envs import TOOL, slots
from tests.keys import key

TASK = Task("Counting-v0", 0)


class Counting(gymnasium.Env[str, str]):
    """Counts its resets, and raises `error` in a step."""

    observation_space = Utf8Text(8)
    action_space = Utf8Text(8)

    def __init__(self, error: BaseException | None = None, resets: list[int] | None = None) -> None:
        self._error = error
        self._resets = [] if resets is None else resets

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self._resets.append(1)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._error is not None:
            raise self._error
        return "", 0.0, False, False, {}


async def step_of(error: BaseException) -> None:
    episode = GymEpisode(Counting(error), TASK)
    await episode.reset()
    await episode.step("go")


@pytest.mark.parametrize("error", [UnreachableError("the judge"), KeyError("x"), SystemExit(0)])
def test_an_error_inside_an_environment_is_an_env_error_and_not_a_connection_error(error: BaseException) -> None:
    with pytest.raises(EnvError, match="Counting-v0 raised"):
        clock.run(step_of, error)


class Reads(Counting):
    """Raises in a library that it calls."""

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return self._read(action), 0.0, False, False, {}

    def _read(self, action: str) -> str:
        return str(json.loads(action))


def test_an_error_names_the_line_of_the_environment_and_not_of_the_library_that_it_called() -> None:
    async def main() -> None:
        episode = GymEpisode(Reads(), TASK)
        await episode.reset()
        await episode.step("{")

    with pytest.raises(EnvError) as raised:
        clock.run(main)
    lines, first = inspect.getsourcelines(Reads)
    (number,) = (first + place for place, line in enumerate(lines) if "json.loads" in line)
    assert raised.value.cause.startswith("JSONDecodeError in step: Expecting property name")
    assert raised.value.place == f"{__file__}:{number}"
    assert "json/decoder.py" in raised.value.trace


def test_an_error_for_remote_callers_and_its_pickled_copy_keep_what_they_may_say() -> None:
    error = EnvError("Counting-v0", "KeyError in step: 'x'", "/home/me/counting.py:7", "Traceback ...")
    assert str(pickle.loads(pickle.dumps(error))) == "Counting-v0 raised KeyError in step: 'x' (/home/me/counting.py:7)"
    public = error.for_callers()
    assert (str(public), public.trace) == ("Counting-v0 raised KeyError in step: 'x' (counting.py:7)", "")
    older = {**to_problem(error), "fields": {"env_id": "Counting-v0", "cause": "KeyError: 'x'"}}
    assert str(from_problem(older)) == "Counting-v0 raised KeyError: 'x'"


@pytest.mark.parametrize(("grade", "success"), [(1.0, 1.0), (0.5, 0.0)])
def test_the_last_step_of_a_graded_episode_has_the_grade(grade: float, success: float) -> None:
    with closing(BlockingEnv("Graded-v0", slots, {"grade": grade})) as env:
        assert env.reset(seed=0) == ("start", {"metrics": {"success": "last"}, "system": "Be brief.", "tools": [TOOL]})
        assert env.step("go on") == ("go on", 0.25, False, False, {})
        assert env.step("end") == ("end", 0.25 + grade, True, False, {"grade": grade, "success": success})


def test_an_episode_that_could_not_be_graded_raises() -> None:
    with closing(BlockingEnv("Graded-v0", slots, {"grade": None})) as env:
        env.reset(seed=0)
        with pytest.raises(EnvError, match="Graded-v0 raised no grade: the grader could not run"):
            env.step("end")


@pytest.mark.parametrize("env_id", ["FrozenLake-v0", "Arithmetic-v0", "Questions-v0"])
@pytest.mark.parametrize("seed", ["a", -1, 1.0])
def test_a_seed_that_is_no_whole_number_is_refused(env_id: str, seed: Any) -> None:
    with (
        envkit.make(env_id) as env,
        pytest.raises(OptionError, match=f"^seed: must be a whole number from 0, .*{seed}"),
    ):
        env.reset(seed=seed)


@pytest.mark.parametrize("error", [OptionError("size", "too large"), SandboxLostError("sandbox-1", cause("killed"))])
def test_an_environment_may_refuse_an_option_and_lose_a_sandbox(error: EnvkitError) -> None:
    with pytest.raises(type(error)):
        clock.run(step_of, error)


class Broken(AsyncEnv):
    """Raises `error` in every method but `close`."""

    def __init__(self, error: EnvkitError, call: str) -> None:
        self._error, self._call = error, call

    async def reset(self, *, seed: int, options: Options) -> Reset:
        self._raise("reset")
        return Reset(Observation(""), {}, is_graded=True)

    async def step(self, action: str) -> Step:
        self._raise("step")
        return Step(Observation(""), 0.0, True, False, {})

    async def grade(self) -> float | None:
        self._raise("grade")
        return 0.0

    async def close(self) -> None: ...

    def _raise(self, call: str) -> None:
        if call == self._call:
            raise self._error


async def graded(error: EnvkitError, call: str) -> None:
    episode = AsyncEpisode(Broken(error, call), TASK)
    await episode.reset()
    await episode.step("")
    await episode.grade()


OF_CALLERS = (
    *(UsageError("too long"), ConfigError(["size: too large"]), OptionError("size", "too large")),
    *(MissingFileError("total.py"), RefusedFileError("total.py"), StepOrderError("there is no sandbox")),
)


@pytest.mark.parametrize("call", ["step", "grade"])
@pytest.mark.parametrize("error", OF_CALLERS, ids=lambda error: type(error).__name__)
def test_an_error_in_a_step_or_grader_is_one_of_the_environment_and_not_of_the_caller(
    error: EnvkitError, call: str
) -> None:
    with pytest.raises(EnvError, match=f"^Counting-v0 raised {type(error).__name__} in {call}: "):
        clock.run(graded, error, call)


@pytest.mark.parametrize("call", ["step", "grade"])
def test_a_step_or_grader_may_lack_a_sandbox(call: str) -> None:
    for error in (
        SandboxLostError("sandbox-1", cause("killed")),
        SandboxStartError("sandbox-1", "no image"),
        CapacityError("no room"),
    ):
        with pytest.raises(type(error)):
            clock.run(graded, error, call)


class Unclosable(Broken):
    async def close(self) -> None:
        raise self._error


class UnclosableGym(Counting):
    def close(self) -> None:
        raise KeyError("lake")


def test_an_environment_that_fails_to_close_is_logged_and_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = SandboxLostError("sandbox-1", cause("killed"))

    async def main() -> None:
        async with SlotHost(
            lambda env_id: UnclosableGym() if env_id == "Lake-v0" else Unclosable(error, ""), 2
        ) as host:
            for task in (TASK, Task("Lake-v0", 0)):
                async with host.lease(task) as episode:
                    await episode.reset()

    clock.run(main)
    assert caplog.messages == ["Counting-v0: close failed", "Lake-v0: close failed"]
    assert "sandbox sandbox-1 lost" in caplog.text


def test_others_get_their_turn_between_the_resets_of_many_sessions() -> None:
    resets: list[int] = []
    seen: list[int] = []

    async def watch() -> None:
        while len(resets) < 40:
            seen.append(len(resets))
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        host = SlotHost(lambda env_id: Counting(resets=resets), 40)
        async with SessionTable(host) as table, anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(table.create, key(f"s{number}"), TASK)
            tasks.start_soon(watch)

    clock.run(main)
    assert max(later - sooner for sooner, later in itertools.pairwise(seen)) <= 2


class Changing(gymnasium.Env[str, str]):
    """Names other moves at each step, which need not be texts."""

    observation_space = action_space = Utf8Text(8)
    moves: tuple[list[Any], ...] = (["a", "b"], ["a", "b"], ["b"], [1, 2], [True], [])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self._left = list(self.moves)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return "", 0.0, False, False, {"legal_moves": self._left.pop(0)}


def test_each_observation_names_the_moves_of_its_own_step_as_texts() -> None:
    async def main() -> list[tuple[str, ...]]:
        episode = GymEpisode(Changing(), TASK)
        assert (await episode.reset()).observation.legal_moves == ()
        return [(await episode.step("go")).observation.legal_moves for _ in Changing.moves]

    assert clock.run(main) == [("a", "b"), ("a", "b"), ("b",), ("1", "2"), ("True",), ()]
