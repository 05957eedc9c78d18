"""Rewards that tests write: what counts, and that a missing or malformed file is an error instead of a reward of 0."""

from __future__ import annotations

import pytest

from envkit.environments.terminal.verifier import RewardFileError, read_reward


@pytest.mark.parametrize(
    ("json", "txt", "reward"),
    [
        (None, b"1\n", 1.0),
        (None, b" -0.5 ", -0.5),
        (b'{"reward": 0.25, "speed": 3}', b"1", 0.25),
        (b'{"accuracy": 1}', None, 1.0),
    ],
)
def test_the_reward_is_in_reward_json_or_else_in_reward_txt(
    json: bytes | None, txt: bytes | None, reward: float
) -> None:
    assert read_reward(json, txt) == reward


@pytest.mark.parametrize(
    ("json", "txt", "problem"),
    [
        (None, None, "wrote neither reward.json nor reward.txt"),
        (None, b"", "reward.txt: must be a number"),
        (None, b"one", "reward.txt: must be a number, got b'one'"),
        (None, b"\xff", "reward.txt: must be a number"),
        (None, b"nan", "reward.txt: must be a finite number"),
        (None, b"1e999", "reward.txt: must be a finite number"),
        (b"", b"1", "reward.json: must be an object of numbers"),
        (b"1", None, "reward.json: must be an object of numbers"),
        (b"{}", None, "reward.json: needs a key `reward`"),
        (b'{"a": 1, "b": 0}', None, "reward.json: needs a key `reward`, or only one key"),
        (b'{"reward": true}', None, "reward.json: must be an object of numbers"),
        (b'{"reward": "1"}', None, "reward.json: must be an object of numbers"),
        (b'{"reward": 1, "speed": NaN}', None, "reward.json: must be an object of numbers"),
        (b'{"reward": 1' + b"0" * 400 + b"}", None, "reward.json: must be an object of numbers"),
    ],
)
def test_a_missing_or_malformed_reward_is_an_error(json: bytes | None, txt: bytes | None, problem: str) -> None:
    with pytest.raises(RewardFileError, match=problem.replace("'", ".").replace("(", ".")):
        read_reward(json, txt)
