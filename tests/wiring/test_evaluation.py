"""How well a policy plays: the same tasks as in training, numbers by hand, and what does not count."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import pytest

from envkit import clock, config
from envkit.errors import OptionError, UnknownEnvError, UsageError
from envkit.spaces import Utf8Text
from envkit.trainer_bridge.display import SilentDisplay
from envkit.types import Info, Observation, Task
from envkit.vector import SlotHost
from envkit.wiring import checks, envs
from envkit.wiring.evaluation import (
    Evaluation,
    Outcome,
    RandomPlayer,
    estimate,
    evaluate,
    evaluation_tasks,
    play,
    summarise,
)


def evaluated(env_id: str, policy: str, *, split: str = "eval", seed: int = 3, **options: Any) -> Evaluation:
    async def main() -> Evaluation:
        return await evaluate(
            env_id, policy, episodes=40, seed=seed, options=options, split=split, display=SilentDisplay()
        )

    return clock.run(main)


def test_the_expert_crosses_every_lake_and_its_numbers_agree() -> None:
    found = evaluated("FrozenLake-v0", "expert")
    assert (found.episodes, found.void, found.error) == (40, 0, None)
    assert list(found.metrics)[:3] == ["success", "return", "turns"]
    assert found.metrics["success"].mean == found.metrics["return"].mean == 1.0
    assert found.metrics["success"].low == pytest.approx(40 / (40 + 1.959964**2))
    assert found.metrics["action_is_valid"].mean == 1.0


def test_the_same_arguments_play_the_same_episodes_and_another_seed_others() -> None:
    first, again, other = (evaluated("FrozenLake-v0", "random", seed=seed) for seed in (3, 3, 4))
    assert first.metrics == again.metrics
    assert first.metrics != other.metrics


def test_the_tasks_are_those_that_a_training_run_is_evaluated_on() -> None:
    run = config.parse({"env": {"id": "Sokoban-v0", "options": {"size": 7}}})
    spec = envs.find("Sokoban-v0")
    expected = [checks.task_of(run, spec, "eval", run.evaluation.seed, number) for number in range(3)]
    found = evaluation_tasks("Sokoban-v0", {"size": 7}, "eval", run.evaluation.seed, 3, spec.splits)
    assert list(found) == expected


def test_a_world_without_splits_is_not_told_about_them() -> None:
    (task,) = evaluation_tasks("Plain-v0", {"a": 1}, "eval", 0, 1, splits=())
    assert task.options == {"a": 1}


def test_the_options_that_were_really_played_are_reported() -> None:
    assert evaluated("FrozenLake-v0", "expert", size=5).as_json()["options"] == {"size": 5, "split": "eval"}
    assert evaluated("FrozenLake-v0", "expert", split="any").as_json()["options"] == {}


def test_what_cannot_be_asked_for_is_refused_with_the_nearest_word() -> None:
    with pytest.raises(UnknownEnvError, match="did you mean 'FrozenLake-v0'"):
        evaluated("FrozenLak-v0", "random")
    with pytest.raises(UsageError, match="--policy: there is no 'exprt'; did you mean 'expert'"):
        evaluated("FrozenLake-v0", "exprt")
    with pytest.raises(UsageError, match="--split: there is no 'evil'; did you mean 'eval'"):
        evaluated("FrozenLake-v0", "random", split="evil")
    with pytest.raises(OptionError, match="slop: no such option; did you mean 'slip'"):
        evaluated("FrozenLake-v0", "random", slop=0.5)


def test_wilsons_interval_of_eight_out_of_ten() -> None:
    assert estimate([1.0] * 8 + [0.0] * 2, is_share=True) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)


def test_no_success_out_of_ten_leaves_room_above_but_none_below() -> None:
    found = estimate([0.0] * 10, is_share=True)
    assert found == pytest.approx((0.0, 0.0, 0.2775), abs=1e-4)
    assert found.low == 0.0


def test_the_interval_of_other_values_is_the_normal_one() -> None:
    # The standard deviation of 1, 2, 3, 4 is 1.29099, so the half width is 1.959964 * 1.29099 / 2.
    assert estimate([1.0, 2.0, 3.0, 4.0], is_share=False) == pytest.approx((2.5, 1.23485, 3.76515), abs=1e-5)
    assert estimate([1.0], is_share=False) == (1.0, 1.0, 1.0)


def test_a_metric_is_summed_up_over_the_episodes_that_have_it() -> None:
    found = summarise([{"return": 2.0, "turns": 1.0, "depth": 7.0}, {"return": 4.0, "turns": 2.0}])
    assert {name: one.mean for name, one in found.items()} == {"return": 3.0, "turns": 1.5, "depth": 7.0}
    assert list(found) == ["return", "turns", "depth"]


class Brittle(gymnasium.Env[str, str]):
    """Two steps worth 1 each; the world breaks on odd seeds."""

    observation_space = Utf8Text(10)
    action_space = Utf8Text(10)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self.odd, self.steps = bool((seed or 0) % 2), 0
        return "go", {"legal_moves": ["on"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self.odd:
            raise RuntimeError("it broke")
        self.steps += 1
        return "go", 1.0, self.steps == 2, False, {"legal_moves": ["on"]}


def test_an_episode_whose_world_breaks_is_void_and_the_others_count() -> None:
    async def main() -> list[Outcome]:
        async with SlotHost(lambda env_id: Brittle(), 2) as host:
            tasks = [Task("Brittle-v0", seed) for seed in range(5)]
            return await play(RandomPlayer("Brittle-v0", None), host, tasks, 0, display=SilentDisplay())

    outcomes = clock.run(main)
    assert [outcome.error for outcome in outcomes] == [
        None,
        "Brittle-v0 raised RuntimeError: it broke",
        None,
        "Brittle-v0 raised RuntimeError: it broke",
        None,
    ]
    assert [outcome.metrics.get("return") for outcome in outcomes] == [2.0, None, 2.0, None, 2.0]


def test_a_random_player_needs_legal_moves() -> None:
    with pytest.raises(UsageError, match="Odd-v0 lists no legal moves"):
        RandomPlayer("Odd-v0", None).act(Observation("?"), random.Random(0))
