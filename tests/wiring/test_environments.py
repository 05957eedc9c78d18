"""Environments by name: options, copies in processes, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import anyio
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv

import envkit
from envkit.errors import ConfigError, EnvError, OptionError, StepOrderError, UnreachableError, UsageError
from envkit.spaces import Utf8Text
from envkit.types import Info, Task
from envkit.wiring import environments
from envkit.wiring.environments import VectorMode

EVERY_RESET = pytest.mark.parametrize("autoreset", list(AutoresetMode))
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


def test_url_none_is_the_default() -> None:
    assert type(envkit.make_vec("FrozenLake-v0", 2, url=None)) is type(envkit.make_vec("FrozenLake-v0", 2))
    with pytest.raises(UnreachableError):
        envkit.make_vec("FrozenLake-v0", 2, url="http://127.0.0.1:1")


def _vector(mode: VectorMode, autoreset: AutoresetMode, **options: Any) -> closing[VectorEnv[Any, Any, Any]]:
    return closing(envkit.make_vec("FrozenLake-v0", 2, mode=mode, autoreset=autoreset, **options))


@EVERY_RESET
def test_processes_play_the_same_as_native_copies(autoreset: AutoresetMode) -> None:
    played = []
    for mode in ("native", "async"):
        with _vector(mode, autoreset, max_moves=2, slip=0.5, instructions=False) as vector:
            played.append([_plain(one) for one in _played(vector, autoreset)])
    assert played[0] == played[1]


def _played(vector: VectorEnv[Any, Any, Any], autoreset: AutoresetMode) -> Iterator[Any]:
    yield vector.reset(seed=3)
    for step in range(7):
        played = vector.step((MOVES[step % 4], MOVES[step % 3]))
        yield played
        over = played[2] | played[3]
        if autoreset is AutoresetMode.DISABLED and over.any():
            yield vector.reset(options={"reset_mask": over})
    yield vector.reset()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return str(value.dtype), _plain(value.tolist())
    return value


@contextmanager
def _raises_from_a_process(kind: type[Exception], match: str) -> Iterator[None]:
    with pytest.warns(UserWarning, match="ERROR"), pytest.raises(kind, match=match):
        yield


@EVERY_RESET
def test_errors_of_a_process_keep_their_class(autoreset: AutoresetMode) -> None:
    with _vector("async", autoreset) as vector, _raises_from_a_process(OptionError, r"^slip: .* got '5%'$"):
        vector.reset(options={"slip": "5%"})
    with _vector("async", autoreset) as vector, _raises_from_a_process(StepOrderError, "^step before reset"):
        vector.step(MOVES[:2])
    with _vector("async", autoreset, action="index") as vector:
        vector.reset(seed=0)
        with _raises_from_a_process(UsageError, "^an action must be an integer, got 'nothing'"):
            vector.step(("nothing", "nothing"))
