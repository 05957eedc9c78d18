"""Endings of evaluated episodes, and the comparison of two evaluations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from envkit.errors import UsageError
from envkit.trainer_bridge.evaluation.compare import compare
from envkit.trainer_bridge.evaluation.outcomes import EvaluatedEpisode, TokenUsage, measure
from envkit.types import FinishReason, GenerationRecord, Outcome, StopReason
from envkit.wiring.api import evaluate

NONE, CUT = TokenUsage(), TokenUsage(completions=2, cut=1)


def ended(stop: StopReason, success: float | None, usage: TokenUsage = NONE) -> EvaluatedEpisode:
    return EvaluatedEpisode(Outcome.score(stop, 1.0, {} if success is None else {"success": success}), usage=usage)


@pytest.mark.parametrize(
    ("episode", "ending"),
    [
        (ended(StopReason.TERMINATED, 1.0), "solved"),
        (ended(StopReason.MAX_TURNS, 1.0, CUT), "solved"),
        (ended(StopReason.TERMINATED, 0.0), "wrong"),
        (ended(StopReason.TRUNCATED, None), "ended"),
        (ended(StopReason.MAX_TURNS, 0.0, CUT), "cut_by_turns"),
        (ended(StopReason.CONTEXT_OVERFLOW, None), "cut_by_context"),
        (ended(StopReason.PLAYER_TIMEOUT, 0.0), "cut_by_time"),
        (ended(StopReason.TERMINATED, 0.0, CUT), "cut_by_length"),
        (EvaluatedEpisode(Outcome.void(StopReason.NO_GRADE, "the grader could not run")), "void"),
    ],
)
def test_each_episode_has_one_ending(episode: EvaluatedEpisode, ending: str) -> None:
    assert episode.ending == ending


@pytest.mark.parametrize(
    ("tokens", "is_cut"),
    [
        ({"completion_ids": (5,)}, False),
        ({"completion_ids": (5, 6)}, True),
        ({"usage": (9, 1)}, False),
        ({"usage": (9, 2)}, True),
        ({"usage": (0, 0)}, True),
    ],
)
def test_an_answer_at_the_token_limit_is_cut_unless_it_has_one_token(tokens: dict[str, Any], is_cut: bool) -> None:
    record = GenerationRecord(prompt="", completion="", finish=FinishReason.LENGTH, seconds=0.0, **tokens)
    assert record.is_cut is is_cut


def test_means_leave_out_void_episodes_and_are_given_with_and_without_those_cut_off() -> None:
    won, lost, cut = (
        ended(*one) for one in [(StopReason.TERMINATED, 1.0), (StopReason.TERMINATED, 0.0), (StopReason.MAX_TURNS, 0.0)]
    )
    void = EvaluatedEpisode(Outcome.void(StopReason.TIMEOUT, "slow"))
    found = measure([[won, void], [lost], [cut, won]], 1)
    assert found["success"].mean == 0.5
    assert found["success_uncut"].mean == pytest.approx(2 / 3)
    assert "success_uncut" not in measure([[won], [lost]], 1)


def test_attempts_give_the_share_of_tasks_that_one_or_all_attempts_solve_and_of_those_that_flip() -> None:
    won, lost = ended(StopReason.TERMINATED, 1.0), ended(StopReason.TERMINATED, 0.0)
    found = measure([[won, won], [won, lost], [lost, lost], [won, lost]], 2)
    assert [found[name].mean for name in ("success", "pass@1", "pass@2", "pass^2", "flips")] == [
        0.5,
        0.5,
        0.75,
        0.25,
        0.5,
    ]


def test_a_comparison_names_settings_differences_and_flips(tmp_path: Path) -> None:
    for name, policy, turns in (("a", "random", 2), ("b", "expert", 8)):
        evaluate("FrozenLake-v0", policy, episodes=12, seed=3, max_turns=turns, output=tmp_path / name)
    lines = list(compare(tmp_path / "a", tmp_path / "b" / "evaluation.json"))
    assert '  policy: "random" -> "expert"' in lines
    assert "  rollout.max_turns: 2 -> 8" in lines
    assert "12 tasks, paired" in lines
    (difference,) = [line for line in lines if line.startswith("  success: B - A")]
    flips = [line for line in lines if line.endswith("0% -> 100%")]
    assert difference.split()[4] == f"{len(flips) / 12:.1%}"
    assert f"{len(flips)} tasks flipped (success of A -> B):" in lines
    file = tmp_path / "a" / "episodes.jsonl"
    file.write_text(file.read_text().replace('"start_info":{', '"start_info":{"task":"thin-ice",'))
    named = [line.replace("thin-ice", "seed") for line in compare(tmp_path / "a", tmp_path / "b") if "thin-ice" in line]
    assert named == [re.sub(r"seed \d+", "seed", line) for line in flips]
    same = list(compare(tmp_path / "a", tmp_path / "a"))
    assert "the settings are equal" in same
    assert same[-1] == "no task flipped"
    assert [line.endswith("equal in each task") for line in same if "B - A" in line] == [True, True]


def test_evaluations_without_a_common_task_show_their_settings(tmp_path: Path) -> None:
    for seed in (3, 4):
        evaluate("FrozenLake-v0", "random", episodes=2, seed=seed, output=tmp_path / str(seed))
    lines = compare(tmp_path / "3", tmp_path / "4")
    assert [next(lines) for _ in range(3)][1:] == ["settings that differ (A -> B):", "  evaluation.seed: 3 -> 4"]
    with pytest.raises(UsageError, match="have no task in common; evaluate with the same seed, split and options"):
        list(lines)


def test_only_finished_evaluations_of_this_version_are_compared(tmp_path: Path) -> None:
    for content, message in (
        ('{"env_id": "A-v0", "policy": "nop", "metrics": {}}', "another version of envkit wrote it; evaluate again"),
        ("{}", "is not a result of envkit eval; name folders of finished evaluations"),
    ):
        (tmp_path / "evaluation.json").write_text(content)
        with pytest.raises(UsageError, match=message):
            next(compare(tmp_path, tmp_path))
    with pytest.raises(UsageError, match="No such file or directory; name folders of finished evaluations"):
        next(compare(tmp_path / "none", tmp_path))
