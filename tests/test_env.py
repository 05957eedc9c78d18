"""What a world may say for itself, and that many worlds do not silence the server they are in."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import anyio.lowlevel
import gymnasium
import pytest

from envkit import clock
from envkit.env import GymEpisode
from envkit.errors import CapacityError, EnvError, EnvkitError, OptionError, SandboxLostError, UnreachableError
from envkit.http.sessions import SessionTable
from envkit.spaces import Utf8Text
from envkit.types import Info, Task
from envkit.vector import SlotHost

TASK = Task("World-v0", 0)


class World(gymnasium.Env[str, str]):
    """Counts its resets, and raises `error` in a step."""

    observation_space = Utf8Text(8)
    action_space = Utf8Text(8)

    def __init__(self, error: Exception | None = None, resets: list[int] | None = None) -> None:
        self._error = error
        self._resets = [] if resets is None else resets

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self._resets.append(1)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._error is not None:
            raise self._error
        return "", 0.0, False, False, {}


async def step_of(error: Exception) -> None:
    episode = GymEpisode(World(error), TASK)
    await episode.reset()
    await episode.step("go")


@pytest.mark.parametrize("error", [UnreachableError("the judge"), CapacityError("the judge"), KeyError("x")])
def test_what_breaks_inside_a_world_is_the_worlds_and_not_the_connections(error: Exception) -> None:
    with pytest.raises(EnvError, match="World-v0 raised"):
        clock.run(step_of, error)


@pytest.mark.parametrize("error", [OptionError("size", "too large"), SandboxLostError("box-1", "killed")])
def test_a_world_may_refuse_an_option_and_lose_a_sandbox(error: EnvkitError) -> None:
    with pytest.raises(type(error)):
        clock.run(step_of, error)


def test_others_get_their_turn_between_the_resets_of_many_sessions() -> None:
    resets: list[int] = []
    seen: list[int] = []

    async def watch() -> None:
        while len(resets) < 40:
            seen.append(len(resets))
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        host = SlotHost(lambda env_id: World(resets=resets), 40)
        async with SessionTable(host) as table, anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(table.create, f"s{number}", TASK)
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
