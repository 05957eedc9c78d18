"""What all wrappers promise."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envkit
from envkit.env import GymEpisode
from envkit.metrics import pass_at, pass_at_group
from envkit.types import Task
from envkit.wrappers import EpisodeStatistics, FormatPenalty, History, StrictAnswer, ToolUse, transcript
from tests.wrappers.envs import Adder, Echo

NONSENSE = ["", "\x00", "\ud800", "x" * 2**20, "<answer>" * 1000, "<think>" * 1000, "\N{SNOWMAN}"]
ALL: dict[str, Callable[[Any], gymnasium.Env[str, str]]] = {
    "statistics": EpisodeStatistics,
    "history": lambda env: History(env, transcript, limit=3),
    "tools": lambda env: ToolUse(env, [Adder()]),
    "penalty": lambda env: FormatPenalty(env, 0.5),
    "strict": StrictAnswer,
    "think": lambda env: StrictAnswer(env, think=True),
    "several": lambda env: EpisodeStatistics(History(FormatPenalty(StrictAnswer(env), 0.1), limit=2)),
}
EVERY = pytest.mark.parametrize("wrap", ALL.values(), ids=ALL)


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")
@EVERY
def test_gymnasium_finds_nothing_wrong(wrap: Callable[[Any], gymnasium.Env[str, str]]) -> None:
    check_env(wrap(envkit.make("FrozenLake-v0")), skip_render_check=True)


@EVERY
def test_nonsense_is_an_observation_in_the_space(wrap: Callable[[Any], gymnasium.Env[str, str]]) -> None:
    for text in NONSENSE:
        env = wrap(envkit.make("Sokoban-v0"))
        env.reset(seed=0)
        step = env.step(text)
        assert env.observation_space.contains(step[0])
        assert step[2:4] == (False, False)


@EVERY
def test_an_episode_can_be_carried_on_in_a_copy(wrap: Callable[[Any], gymnasium.Env[str, str]]) -> None:
    env = wrap(envkit.make("FrozenLake-v0"))
    env.reset(seed=3)
    env.step("nothing")
    copy = pickle.loads(pickle.dumps(env))
    assert copy.step("<answer>up</answer>") == env.step("<answer>up</answer>")


@EVERY
def test_metrics_that_are_named_are_reported(wrap: Callable[[Any], gymnasium.Env[str, str]]) -> None:
    env = wrap(Echo())
    env.reset()
    *_, info = env.step("wait")
    assert set(env.metadata["metrics"]) <= set(info)


def test_the_rollout_sees_the_metrics_of_a_wrapped_environment() -> None:
    import anyio

    async def main() -> dict[str, Any]:
        episode = GymEpisode(StrictAnswer(envkit.make("FrozenLake-v0")), Task("FrozenLake-v0", 0))
        return (await episode.reset()).info

    metrics = anyio.run(main)["metrics"]
    assert metrics["format_is_valid"] == "mean"
    assert metrics["success"] == "last"


def test_gymnasium_makes_a_wrapped_environment_again_from_its_spec() -> None:
    env = FormatPenalty(gymnasium.make("envkit/FrozenLake-v0"), 0.5)
    assert env.spec is not None
    again = gymnasium.make(env.spec)
    again.reset(seed=0)
    assert again.step("nothing")[1] == -0.5


@EVERY
def test_environments_that_are_not_text_are_refused(wrap: Callable[[Any], gymnasium.Env[str, str]]) -> None:
    grid = envkit.make("FrozenLake-v0", observation="grid")
    message = f"needs a text environment; this one has the observation space {grid.observation_space}"
    with pytest.raises(TypeError, match=re.escape(message)):
        wrap(grid)
    with pytest.raises(TypeError, match=r"needs a text environment; this one has the action space Discrete\(4\)"):
        wrap(envkit.make("FrozenLake-v0", action="index"))


def test_memory_of_an_episode_ends_with_it() -> None:
    env = EpisodeStatistics(History(Echo(limit=50)))
    sizes = set()
    for _ in range(5):
        env.reset()
        while not any(env.step("wait")[2:4]):
            pass
        env.reset()
        sizes.add(len(pickle.dumps(env)))
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("k", "successes", "attempts", "chance"),
    [(1, 1, 4, 0.25), (2, 1, 4, 0.5), (4, 1, 4, 1.0), (3, 2, 4, 1.0), (2, 0, 4, 0.0), (2, 2, 5, 0.7)],
)
def test_pass_at_k_is_the_chance_that_one_of_k_succeeds(k: int, successes: int, attempts: int, chance: float) -> None:
    assert pass_at(k, [True] * successes + [False] * (attempts - successes)) == pytest.approx(chance)


def test_pass_at_more_attempts_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and the number of results, 2, got 3"):
        pass_at(3, [True, False])


def test_a_group_passes_with_one_success() -> None:
    assert pass_at_group([[False, True], [False, False], [True, True], [False, False]]) == 0.5
    assert np.isnan(pass_at_group([]))
