"""Recorded episodes: content of the file, sampling of episodes, and unreadable files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import envkit
from envkit import clock
from envkit.errors import SandboxLostError, UsageError
from envkit.runs.episodes import read_episodes, sample_episodes
from envkit.runs.files import replace_rows
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.scheduler import Rollout, RolloutResult
from envkit.types import Task
from envkit.wiring import environments
from tests.causes import cause
from tests.trainer_bridge.fakes import Answer, Call, LetterRenderer, ScriptedEngine, ScriptedHost, letters, text_of

LIMITS = RolloutLimits(max_turns=9, max_tokens=5000, turn_tokens=40, step_timeout_s=10, retries=0)
MOVES = ("right", "down", "fly", "left", "down")


def lake_episodes(tasks: Sequence[Task]) -> RolloutResult:
    """Episodes on real lakes by a policy that always plays the same moves, one of them invalid."""
    turns: dict[str | None, int] = {}

    def say(call: Call) -> str:
        turns[call.session] = turn = turns.get(call.session, -1) + 1
        return f"<answer>{MOVES[turn % len(MOVES)]}</answer>!"

    async def main() -> RolloutResult:
        async with environments.slots(8) as host:
            rollout = Rollout(host, PolicyPlayer(ScriptedEngine(say), LetterRenderer(), LIMITS), LIMITS, 8)
            return await rollout.groups(tasks, 2, phase="train-4", temperature=1.0, seed=0)

    return clock.run(main)


def scripted(*answers: Answer, groups: int = 1, members: int = 1) -> RolloutResult:
    """Episodes with scripted observations and the action "up"."""

    async def main() -> RolloutResult:
        host = ScriptedHost(lambda task, time: answers)
        rollout = Rollout(host, PolicyPlayer(ScriptedEngine(lambda call: "up"), LetterRenderer(), LIMITS), LIMITS, 100)
        tasks = [Task("Scripted-v0", seed) for seed in range(groups)]
        return await rollout.groups(tasks, members, phase="train-4", temperature=1.0, seed=0)

    return clock.run(main, virtual=True)


def written(path: Path, result: RolloutResult, count: int = 100) -> list[dict[str, Any]]:
    """The JSON objects in a file with the episodes of `result`."""
    replace_rows(path, sample_episodes(result.groups, count, decode=text_of, train_step=4))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_alone_is_enough_to_see_every_board_again(tmp_path: Path) -> None:
    tasks = [Task("FrozenLake-v0", seed, {"size": 4, "max_moves": 6}) for seed in range(4)]
    episodes = written(tmp_path / "episodes.jsonl", lake_episodes(tasks))
    assert [episode["seed"] for episode in episodes] == [0, 0, 1, 1, 2, 2, 3, 3]
    for episode in episodes:
        with envkit.make(episode["env_id"]) as env:
            board, _ = env.reset(seed=episode["seed"], options=episode["options"])
            assert episode["start"]["text"] == board
            for turn in episode["turns"]:
                board, reward, *_ = env.step(turn["action"])
                assert (turn["observation"]["text"], turn["reward"]) == (board, reward)


def test_prompts_and_completions_stand_as_text_beside_their_tokens(tmp_path: Path) -> None:
    (episode,) = written(tmp_path / "file", scripted(Answer("first"), Answer("then"), Answer("end", ends="terminated")))
    generations = [turn["generation"] for turn in episode["turns"]]
    assert [(one["prompt"], one["completion"]) for one in generations] == [("[first]", "up"), ("[then]", "up")]
    assert generations[0] | {"seconds": 0} == {
        "prompt": "[first]",
        "completion": "up",
        "finish": "length",
        "prompt_ids": list(letters("[first]")),
        "completion_ids": list(letters("up")),
        "logprobs": [-0.5, -1.0],
        "versions": [[0, 2]],
        "seconds": 0,
        "usage": None,
    }


def test_a_line_has_the_end_and_the_reward_of_the_episode(tmp_path: Path) -> None:
    folds: dict[str, Any] = {"metrics": {"success": "last"}}
    answers = (Answer("s", info=folds), Answer("m", 0.25), Answer("e", 1.0, "truncated", info={"success": True}))
    (episode,) = written(tmp_path / "file", scripted(*answers))
    ended = ("stop", "reward", "success", "metrics", "error")
    assert [episode["outcome"][key] for key in ended] == ["truncated", 1.25, True, {}, None]
    assert episode["train_step"] == 4
    assert [turn["reward"] for turn in episode["turns"]] == [0.25, 1.0]


def test_a_lost_episode_keeps_its_turns_and_is_not_valid(tmp_path: Path) -> None:
    lost = Answer(error=SandboxLostError("sb-1", cause("oom-killed")))
    (episode,) = written(tmp_path / "file", scripted(Answer("s"), Answer("m", 1.0), lost))
    assert [episode["outcome"][key] for key in ("stop", "error")] == ["sandbox_lost", "sandbox sb-1 lost: oom-killed"]
    seen = [turn["observation"] for turn in episode["turns"]]
    assert [one and one["text"] for one in seen] == ["m", None]  # the last action was in progress
    (read,) = read_episodes(tmp_path / "file")
    assert not read.outcome.success

    (never,) = written(tmp_path / "file", scripted(lost))
    assert (never["start"], never["turns"]) == (None, [])


@pytest.mark.parametrize(
    ("groups", "members", "count", "chosen"),
    [
        (8, 4, 3, [(0, 0), (2, 0), (5, 0)]),
        (2, 4, 5, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]),
        (2, 2, 9, [(0, 0), (0, 1), (1, 0), (1, 1)]),
    ],
)
def test_episodes_are_taken_from_as_many_tasks_as_there_are(
    groups: int, members: int, count: int, chosen: list[tuple[int, int]], tmp_path: Path
) -> None:
    result = scripted(Answer("s"), Answer("e", ends="terminated"), groups=groups, members=members)
    episodes = written(tmp_path / "file", result, count)
    assert [(one["index"], one["member"]) for one in episodes] == chosen
    assert [one["seed"] for one in episodes] == [index for index, _ in chosen]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "file: is empty; it must have one JSON object per episode"),
        (
            b'{"format":2',
            r"file: line 1 is damaged or not an episode of format 3 \(Input data was truncated\); ",
        ),
        (b'{"step":3,"loss":0.5}\n', "file: line 1 is damaged or not an episode of format 3 .*required field `format`"),
    ],
)
def test_a_damaged_record_is_reported_with_its_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_episodes(tmp_path / "file")


def test_an_episode_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written(path, scripted(Answer("s"), Answer("e", ends="terminated")))
    path.write_bytes(path.read_bytes().replace(b'"format":3', b'"format":4', 1))
    with pytest.raises(
        UsageError, match="file: line 1 has format 4, but envkit reads format 3; record the episodes again"
    ):
        read_episodes(path)


def test_a_last_line_that_was_cut_short_is_left_out_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written(path, scripted(Answer("s"), Answer("e", ends="terminated"), groups=3))
    path.write_bytes(path.read_bytes()[:-20])
    lines: list[str] = []
    assert [one.index for one in read_episodes(path, lines.append)] == [0, 1]
    assert lines == [f"{path}: line 3 is incomplete and left out"]
    with pytest.raises(UsageError, match="file: line 3 is damaged"):
        read_episodes(path)
