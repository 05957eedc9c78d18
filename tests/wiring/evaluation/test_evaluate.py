"""How well a policy plays: the same tasks as in training, numbers by hand, and what does not count."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envkit import clock, config
from envkit.config import evaluation
from envkit.errors import UsageError
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.evaluation.result import Evaluation, task_set_hash
from envkit.trainer_bridge.evaluation.statistics import Estimate
from envkit.trainer_bridge.evaluation.table import lines
from envkit.trainer_bridge.rollout.players import RandomPlayer
from envkit.types import EpisodeRecord, Observation, Task
from envkit.wiring import environments, tasks
from envkit.wiring.evaluation.evaluate import evaluate
from envkit.wiring.evaluation.policies import find_policy


def evaluated(env_id: str, policy: str, **settings: Any) -> Evaluation:
    described = evaluation.read(env_id, policy=policy, **{"episodes": 40, "seed": 3, **settings})
    return clock.run(partial(evaluate, described, display=SilentDisplay()))


def test_the_expert_crosses_every_lake_and_its_numbers_agree() -> None:
    found = evaluated("FrozenLake-v0", "expert")
    assert (found.episodes, found.void, found.error) == (40, 0, None)
    assert list(found.metrics)[:3] == ["success", "return", "turns"]
    assert found.metrics["success"].mean == found.metrics["return"].mean == 1.0
    assert found.metrics["success"].low == pytest.approx(40 / (40 + 1.959964**2))
    assert found.metrics["action_is_valid"].mean == 1.0


def test_the_tasks_are_those_that_a_training_run_is_evaluated_on() -> None:
    run = config.parse({"env": {"id": "Sokoban-v0", "options": {"size": 7}}})
    spec = environments.find("Sokoban-v0")
    (section,) = run.envs
    expected = [tasks.task(spec, section.options, "eval", run.evaluation.seed, number) for number in range(3)]
    assert list(tasks.all_tasks(spec, {"size": 7}, "eval", run.evaluation.seed, 3)) == expected


def test_the_options_that_were_really_played_are_reported() -> None:
    assert evaluated("FrozenLake-v0", "expert", options={"size": 5}).as_json()["options"] == {
        "size": 5,
        "split": "eval",
    }
    found: Any = evaluated("FrozenLake-v0", "expert", split="any").as_json()
    assert found["options"] == {}
    limits = found["settings"]["limits"]
    assert {name: value for name, value in limits.items() if value is not None} == {
        "max_turns": 10_000, "step_timeout_s": 600.0, "retries": 0, "grade_timeout_s": 600.0,
    }  # fmt: skip


def test_rooms_of_a_file_are_played(tmp_path: Path) -> None:
    rooms = tmp_path / "rooms.txt"
    rooms.write_text("#####\n#@$.#\n#   #\n#   #\n#####\n")
    found = evaluated("Sokoban-v0", "expert", split="any", options={"level_file": str(rooms)})
    assert (found.metrics["success"].mean, found.metrics["turns"].mean) == (1.0, 1.0)
    assert found.options == {"level_file": str(rooms)}


def test_an_attempt_more_leaves_those_before_it_as_they_are() -> None:
    one, three = (evaluated("FrozenLake-v0", "random", attempts=attempts) for attempts in (1, 3))
    assert [(length, attempts[:1]) for length, attempts in three.levels] == [tuple(level) for level in one.levels]
    assert any(attempts[0] != attempts[1] for _, attempts in three.levels)


def test_a_random_player_needs_legal_moves() -> None:
    message = "^the environment lists no legal moves .*; use the policy expert if it has an expert, or a language model"
    with pytest.raises(UsageError, match=message):
        RandomPlayer(None).choose(Observation("?"), random.Random(0))


def test_random_and_expert_play_the_actions_that_they_always_played() -> None:
    def actions(policy: str) -> str:
        played: dict[tuple[int, int], list[str]] = {}

        def note(episode: EpisodeRecord) -> None:
            played[episode.index, episode.member] = [turn.action for turn in episode.turns]

        described = evaluation.read("FrozenLake-v0", policy=policy, episodes=6, attempts=2, seed=3)
        clock.run(partial(evaluate, described, display=SilentDisplay(), on_episode=note))
        return hashlib.sha256(repr(sorted(played.items())).encode()).hexdigest()[:16]

    assert (actions("random"), actions("expert")) == ("20369c94e16c49fd", "f1de4c259a98c553")


def test_a_kind_of_tool_call_has_a_row_only_if_it_occurred() -> None:
    found, (none, half) = evaluated("FrozenLake-v0", "expert"), (Estimate(0, 0, 0), Estimate(0.5, 0, 1))
    counts = {"success": none, "tool_call_ok": half, "tool_call_unclosed": none, "tool_call_no_call": half}
    rows = [line.strip().partition("  ")[0] for line in lines(replace(found, metrics=counts))]
    assert rows[2:5] == ["success", "tool call ok", "turns without a call"]
    assert not any("unclosed" in row for row in rows)


def test_the_hash_of_a_task_set_contains_the_versions_of_the_environment() -> None:
    tasks = [Task("FrozenLake-v0", seed) for seed in (1, 2)]
    assert task_set_hash(tasks, {}) == task_set_hash(tasks[::-1], {})
    assert task_set_hash(tasks, {}) != task_set_hash(tasks, {"rules": 2}) != task_set_hash(tasks, {"rules": 1})


@pytest.mark.parametrize(("env_id", "reset_s"), [("Terminal-v0", 600.0), ("FrozenLake-v0", None)])
def test_a_reset_that_waits_for_a_sandbox_has_its_own_limit_with_every_policy(
    env_id: str, reset_s: float | None
) -> None:
    found = find_policy(
        evaluation.read(env_id, ["rollout.step_timeout_s=30"], policy="random"), environments.find(env_id)
    )
    assert (found.limits.step_timeout_s, found.limits.reset_timeout_s) == (30, reset_s)
