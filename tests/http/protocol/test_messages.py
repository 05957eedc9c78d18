"""Messages: encoding, decoding errors, and batches."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from envkit.errors import RequestError
from envkit.http.protocol import messages
from envkit.http.protocol.messages import MAX_FRAMES, batches, write


class Part(msgspec.Struct, forbid_unknown_fields=True):
    colour: str = ""


class Whole(msgspec.Struct, forbid_unknown_fields=True):
    part: Part | None = None


def test_numpy_values_are_encoded_as_numbers_and_lists() -> None:
    message = {"a": np.float32(0.5), "b": np.arange(3), "c": np.bool_(True), "d": np.int64(7), "e": (1, 2)}
    assert write(message) == b'{"a":0.5,"b":[0,1,2],"c":true,"d":7,"e":[1,2]}'


def test_a_value_that_json_cannot_encode_is_refused_with_its_type() -> None:
    with pytest.raises(RequestError, match="object is not a JSON type"):
        write({"a": object()})
    with pytest.raises(RequestError, match=r"cannot be encoded as JSON: .*surrogates"):
        write("\ud800")


@pytest.mark.parametrize("id", ["a", "0" * 128, "A.b_c~d-9"])
def test_an_id_may_have_characters_that_need_no_quoting(id: str) -> None:
    decoder = msgspec.json.Decoder(messages.CreateSessionBody)
    assert messages.read(write({"env_id": "A-v0", "seed": 1, "session_id": id}), decoder).session_id == id


@pytest.mark.parametrize("id", ["", "a b", "a/b", "ä", "a\n", "0" * 129])
def test_any_other_id_is_refused_with_the_description_of_valid_ones(id: str) -> None:
    decoder = msgspec.json.Decoder(messages.CreateSessionBody)
    with pytest.raises(RequestError, match="session_id: invalid value; must be: Chosen by the caller: 1 to 128"):
        messages.read(write({"env_id": "A-v0", "seed": 1, "session_id": id}), decoder)


def test_messages_are_joined_up_to_a_size_and_a_single_one_is_not_wrapped() -> None:
    assert list(batches([b"1", b"22", b"333", b"4444", b"5"], 5)) == [b"[1,22]", b"333", b"[4444,5]"]
    assert list(batches([b"x" * 9], 5)) == [b"x" * 9]
    assert list(batches([], 5)) == []
    assert [batch.count(b"1") for batch in batches([b"1"] * (2 * MAX_FRAMES + 1), 1 << 20)] == [1000, 1000, 1]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"", "the message is empty; send a JSON object with env_id, seed"),
        (b'{"env_id": "A-v0"', "the message is not JSON: it ends too early; send a JSON object with env_id, seed"),
        (b'{"env_id": "\xff"}', "the message is not JSON: it is not UTF-8"),
        (b'{"env_id": "A-v0", "seed": 1, "options": {"a": ' + b"[" * 9000, "the message is nested too deeply"),
        (b'{"env": "A-v0", "seed": 1}', "unknown field 'env'; did you mean 'env_id'?"),
        (b'{"colour": 1}', "unknown field 'colour'; there are: env_id, options, seed"),
        (b'{"env_id": "A-v0"}', "the field 'seed' is missing"),
        (b'{"env_id": "A-v0", "seed": "1"}', "seed: expected an integer, got a string"),
        (b'{"env_id": "%b", "seed": 1}' % (b"x" * 300), "env_id: expected a string of length <= 256"),
        (b"[]", "expected an object, got a list"),
    ],
)
def test_an_invalid_task_is_refused_with_the_field_and_the_expected_form(message: bytes, expected: str) -> None:
    with pytest.raises(RequestError) as refused:
        messages.read(message, msgspec.json.Decoder(messages.TaskBody))
    assert str(refused.value) == expected


def test_a_similar_name_is_suggested_in_lists_and_nested_messages() -> None:
    with pytest.raises(RequestError, match=r"^\[0\]\.part: unknown field 'color'; did you mean 'colour'\?$"):
        messages.read(b'[{"part": {"color": "red"}}]', msgspec.json.Decoder(list[Whole]))
