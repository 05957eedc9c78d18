"""The files in which tests write a reward."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping


class RewardFileError(Exception):
    """The tests wrote no reward, or one that cannot be read; this says nothing about the agent's work."""


def read_reward(json_content: bytes | None, txt_content: bytes | None) -> float:
    """Return the reward that tests have written.

    Args:
        json_content: Content of ``reward.json``, an object of finite numbers: its reward is that of the key ``reward``,
            or of the only key. None if there is no such file.
        txt_content: Content of ``reward.txt``, a finite number, which counts if there is no ``reward.json``. None if
            there is no such file.

    Raises:
        RewardFileError: Neither file exists, or the one that counts is malformed.
    """
    if json_content is not None:
        return _of_json(json_content)
    if txt_content is None:
        raise RewardFileError("the tests wrote neither reward.json nor reward.txt")
    try:
        return _finite("reward.txt", float(txt_content.decode()))
    except ValueError:
        raise RewardFileError(f"reward.txt: must be a number, got {txt_content[:40]!r}") from None


def _of_json(content: bytes) -> float:
    try:
        found: object = json.loads(content)
    except ValueError as error:
        raise RewardFileError(f"reward.json: not valid JSON: {error}") from None
    if not isinstance(found, Mapping) or not found:
        raise RewardFileError(f"reward.json: must be an object of numbers, got {content[:40]!r}")
    rewards = {str(key): _finite(f"reward.json: {key}", value) for key, value in found.items()}
    if "reward" in rewards:
        return rewards["reward"]
    if len(rewards) > 1:
        raise RewardFileError(f"reward.json: needs a key `reward` besides {', '.join(rewards)}")
    return next(iter(rewards.values()))


def _finite(place: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardFileError(f"{place}: must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFileError(f"{place}: must be a finite number, got {value!r:.40}")
    return number
