"""Dialogues of a file: masks, order, and invalid files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from envkit.errors import UsageError
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.sources.dialogues import Dialogues, read_dialogues
from envkit.types import Sample
from tests.trainer_bridge.models import chat_tokenizer

RENDERER = ChatRenderer(chat_tokenizer())


def dialogue(*texts: str) -> dict[str, list[dict[str, str]]]:
    """A dialogue that starts with the user."""
    return {
        "messages": [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    }


def read(folder: Path, *lines: Mapping[str, object] | str | bytes, max_tokens: int = 1000) -> Dialogues:
    path = folder / "dialogues.jsonl"
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(raw))
    return read_dialogues(path, RENDERER, max_tokens=max_tokens)


def learned(sample: Sample) -> list[str]:
    """The runs of tokens that carry loss, as text."""
    runs: list[list[int]] = [[]]
    for token, own in zip(sample.token_ids.tolist(), sample.mask, strict=True):
        if own:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [RENDERER.text(run) for run in runs if run]


def test_every_answer_of_the_assistant_and_its_end_is_learned_and_nothing_else(tmp_path: Path) -> None:
    found = read(tmp_path, dialogue("hello", "good day", "and now?", "up"))
    (one,) = found.samples
    assert learned(one) == ["good day<|im_end|>", "up<|im_end|>"]
    assert RENDERER.text(one.token_ids.tolist()).startswith(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\ngood day"
    )


def test_a_system_message_and_unknown_keys_are_fine_and_blank_lines_are_left_out(tmp_path: Path) -> None:
    line = {"id": 7, "messages": [{"role": "system", "content": "Be brief."}, *dialogue("a", "b")["messages"]]}
    found = read(tmp_path, "", line, "  ", dialogue("c", "d"), "")
    assert [learned(one) for one in found.samples] == [["b<|im_end|>"], ["d<|im_end|>"]]
    assert "Be brief." in RENDERER.text(found.samples[0].token_ids.tolist())


def test_dialogues_that_are_too_long_are_skipped_and_counted(tmp_path: Path) -> None:
    short, long = dialogue("a", "b"), dialogue("a", "b" * 200)
    found = read(tmp_path, long, short, long, max_tokens=100)
    assert ([learned(one) for one in found.samples], found.skipped) == ([["b<|im_end|>"]], 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', r"line 2 is not a dialogue: Input data was truncated"),
        ("{}", r"line 2 is not a dialogue: Object missing required field `messages`"),
        (
            '{"messages": [{"role": "tool", "content": "a"}]}',
            r"line 2 is not a dialogue: Invalid enum value 'tool' .*role`",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', r"line 2: the dialogue has no message of the assistant"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', r"line 2 is not a dialogue: .*utf-8"),
    ],
)
def test_a_line_that_is_no_dialogue_is_named_by_its_number(line: str | bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^imitation.file: {tmp_path}/dialogues.jsonl, {reason}"):
        read(tmp_path, dialogue("a", "b"), line)


def test_a_file_without_a_dialogue_to_learn_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dialogues\.jsonl has no dialogues to learn from: the file is empty$"):
        read(tmp_path, "", "")
    with pytest.raises(UsageError, match=r"learn from: all 2 are longer than rollout\.max_tokens \(3\)$"):
        read(tmp_path, dialogue("a", "b"), dialogue("c", "d"), max_tokens=3)


def test_an_unreadable_file_is_reported_with_the_reason(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "no.jsonl", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=f"^imitation.file: {path}: {reason}$"):
            read_dialogues(path, RENDERER, max_tokens=10)


def test_every_pass_has_each_dialogue_once_in_a_new_order(tmp_path: Path) -> None:
    found = read(tmp_path, *(dialogue("?", f"{number}") for number in range(10)))
    batch = found.batches(4, seed=3)
    passes = [[batch(update) for update in range(first, first + 3)] for first in (0, 3)]
    assert [[len(samples) for samples in one] for one in passes] == [[4, 4, 2]] * 2
    first, second = ([one.token_ids.tolist() for samples in shown for one in samples] for shown in passes)
    assert sorted(first) == sorted(second) == sorted(one.token_ids.tolist() for one in found.samples)
    assert first != second
