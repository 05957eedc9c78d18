"""What all players promise: how an episode ends whose player fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import gymnasium
import pytest

import envkit
from envkit import clock
from envkit.checks.tasks import check_tasks
from envkit.errors import EnvkitError
from envkit.local_host import SlotHost
from envkit.protocols import EpisodePlayer, Expert, Player
from envkit.spaces import Utf8Text
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.scheduler import Rollout
from envkit.trainer_bridge.sources.demonstrations import Teacher, demonstrations
from envkit.types import Action, Info, Observation, Outcome, Reset, RolloutRequest, StopReason, Task, Trajectory
from tests.trainer_bridge.fakes import Call, LetterRenderer, ScriptedEngine

LIMITS = RolloutLimits(max_turns=9)
TASK = Task("Three-v0", 0)


class Three(gymnasium.Env[str, str]):
    """Ends after three steps, each with the reward 1, and reports success if one of the actions was not empty."""

    metadata = {"metrics": {"success": "last"}}  # noqa: RUF012 - as Gymnasium's
    observation_space = action_space = Utf8Text(1000)

    def __init__(self, **options: Any) -> None: ...

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self.actions: list[str] = []
        return "go", {"legal_moves": ["a", "b"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        self.actions.append(action)
        return "on", 1.0, len(self.actions) == 3, False, {"legal_moves": ["a", "b"], "success": any(self.actions)}


SYNCHRONOUS = SimpleNamespace(act=lambda observation: "a", end=lambda: None)


class Idle(EpisodePlayer):
    def __repr__(self) -> str:
        return "Idle()"


class Fails(Player, EpisodePlayer):
    """Plays one action, then fails in a way."""

    def __init__(self, way: str = "raises", **options: Any) -> None:
        self.way = way

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        odd: dict[str, Any] = {
            "begins with None": None,
            "cannot act": Idle(),  # type: ignore[abstract]
            "acts at once": SYNCHRONOUS,
        }
        return odd.get(self.way, Fails(self.way))  # type: ignore[no-any-return] # the fault

    async def act(self, observation: Observation) -> Action | str:
        if observation.text == "go":
            return "a"
        if self.way == "raises":
            raise RuntimeError("lost its head") from ValueError("its own cause")
        if self.way == "returns None":
            return None  # type: ignore[return-value] # the fault
        await anyio.sleep_forever()
        raise AssertionError


async def ending(way: str) -> object:
    """Return how an episode ends whose player fails: its outcome, its error, or that it was cancelled."""
    ended: list[Trajectory] = []
    with anyio.move_on_after(1.0 if way == "is cancelled" else None) as scope:
        limits = replace(LIMITS, player_timeout_s=5.0, retries=0)
        rollout = Rollout(SlotHost(lambda env_id: Three(), 1), Fails(way), limits, 1)
        try:
            await rollout.groups([TASK], phase="p", seed=0, on_episode=ended.append)
        except Exception as error:
            return type(error), str(error), len(ended)
    return ("cancelled", len(ended)) if scope.cancelled_caught else ended[0].outcome


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("raises", (RuntimeError, "lost its head", 0)),
        (
            "returns None",
            (EnvkitError, "the player returned None instead of an action, which must be a text or an Action", 0),
        ),
        (
            "begins with None",
            (EnvkitError, "begin of the player returned None instead of an EpisodePlayer: it has no method act", 0),
        ),
        (
            "cannot act",
            (EnvkitError, "begin of the player returned Idle() instead of an EpisodePlayer: it has no method act", 0),
        ),
        (
            "acts at once",
            (EnvkitError, "act of the player returned 'a' at once; write it as `async def act`", 0),
        ),
        ("hangs", Outcome(stop=StopReason.PLAYER_TIMEOUT, reward=1.0, success=True)),
        ("is cancelled", ("cancelled", 0)),
    ],
)
def test_a_player_that_fails_ends_its_episode(way: str, expected: object) -> None:
    assert clock.run(ending, way, virtual=True) == expected


class Raises(Expert):
    def moves(self, observation: Observation) -> Sequence[str]:
        raise RuntimeError("lost its head")

    def is_hazardous(self, observation: Observation) -> bool:
        return False

    def answer(self, move: str) -> str:
        return move


def train() -> None:
    def say(call: Call) -> str:
        raise RuntimeError("lost its head")

    player = PolicyPlayer(ScriptedEngine(say), LetterRenderer(), LIMITS)
    clock.run(
        partial(Rollout(SlotHost(lambda env_id: Three(), 1), player, LIMITS, 1).groups, [TASK], phase="p", seed=0)
    )


def demonstrate() -> None:
    teacher = Teacher(Raises(), LetterRenderer(), noise=0.0)
    clock.run(demonstrations, SlotHost(lambda env_id: Three(), 1), teacher, iter([TASK]), 1, 0, LIMITS)


PROGRAMS: Mapping[str, Callable[[], object]] = {
    "train": train,
    "demonstrations": demonstrate,
    "eval": lambda: envkit.evaluate("ThreeFails-v0", "oracle", episodes=2),
    "check-task": lambda: check_tasks("ThreeFails-v0", tasks=1, repeat=1),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_error_of_the_player_is_the_error_of_the_program(program: str) -> None:
    if all(one.id != "ThreeFails-v0" for one in envkit.registered()):
        envkit.register("ThreeFails-v0", Three, players={"oracle": Fails})
    with pytest.raises(RuntimeError, match="lost its head") as failed:
        PROGRAMS[program]()
    assert "ExceptionGroup" not in "".join(traceback.format_exception(failed.value))
    if program in ("eval", "check-task"):
        assert str(failed.value.__cause__) == "its own cause"
