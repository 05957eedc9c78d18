"""Messages: what JSON can say, what it cannot, and how many travel together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace

from envkit.errors import RequestError
from envkit.http.wire import MAX_FRAMES, ResetReply, StepReply, batches, read_id, write
from envkit.types import Observation, Reset, Step


def test_values_of_numpy_travel_as_numbers_and_lists() -> None:
    message = {"a": np.float32(0.5), "b": np.arange(3), "c": np.bool_(True), "d": np.int64(7), "e": (1, 2)}
    assert write(message) == b'{"a":0.5,"b":[0,1,2],"c":true,"d":7,"e":[1,2]}'


def test_what_json_cannot_say_is_refused_with_its_kind() -> None:
    with pytest.raises(RequestError, match="a object is not JSON"):
        write({"a": object()})
    with pytest.raises(RequestError, match=r"cannot be said in JSON: .*surrogates"):
        write("\ud800")


@pytest.mark.parametrize("reward", [0.25, -3.0, math.inf, -math.inf, math.nan])
def test_a_step_is_the_same_after_the_wire(reward: float) -> None:
    step = Step(Observation("text", ("up",), ("aW1hZ2U=",)), reward, True, False, {"success": True})
    back = StepReply.of(3, step).step()
    assert back.reward == pytest.approx(reward, nan_ok=True)
    assert replace(back, reward=0.0) == replace(step, reward=0.0)


def test_a_start_is_the_same_after_the_wire() -> None:
    start = Reset(Observation("text", ("up",), ("aW1hZ2U=",)), {"level": 3})
    assert ResetReply.of(0, start).reset() == start


@pytest.mark.parametrize("text", ["a", "0" * 128, "A.b_c~d-9"])
def test_an_id_may_hold_what_needs_no_quoting(text: str) -> None:
    assert read_id(text) == text


@pytest.mark.parametrize("text", ["", "a b", "a/b", "ä", "a\n", "0" * 129])
def test_any_other_id_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not the id of a session"):
        read_id(text)


def test_messages_are_joined_up_to_a_size_and_a_single_one_stays_single() -> None:
    assert list(batches([b"1", b"22", b"333", b"4444", b"5"], 5)) == [b"[1,22]", b"333", b"[4444,5]"]
    assert list(batches([b"x" * 9], 5)) == [b"x" * 9]
    assert list(batches([], 5)) == []
    assert [batch.count(b"1") for batch in batches([b"1"] * (2 * MAX_FRAMES + 1), 1 << 20)] == [1000, 1000, 1]
