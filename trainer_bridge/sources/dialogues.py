"""Dialogues from a JSON-lines file, as samples for supervised fine-tuning. This module does not import torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from envkit.errors import UsageError
from envkit.types import Sample, stable_hash

from ..render.chat import ChatRenderer
from .demonstrations import unscored_sample


class _DialogueMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class _DialogueLine(msgspec.Struct, frozen=True):
    messages: list[_DialogueMessage]


@dataclass(frozen=True, slots=True)
class Dialogues:
    """The dialogues of a file.

    Attributes:
        samples: One sample per dialogue; the mask is 1 on the assistant's answers.
        skipped: Number of dialogues that were skipped because they are too long.
    """

    samples: Sequence[Sample]
    skipped: int

    def batches(self, size: int, seed: int) -> Callable[[int], list[Sample]]:
        """Return a function that maps an update's index to its `size` samples; each pass has a new random order."""
        in_epoch = -(-len(self.samples) // size)

        def batch(update: int) -> list[Sample]:
            epoch, index = divmod(update, in_epoch)
            order = random.Random(stable_hash(seed, "dialogues", epoch)).sample(self.samples, len(self.samples))
            return order[index * size : (index + 1) * size]

        return batch


def read_dialogues(path: Path, renderer: ChatRenderer, *, max_tokens: int) -> Dialogues:
    """Read a file with ``{"messages": [{"role": "user", "content": "..."}, ...]}`` per line; blank lines are ignored.

    The file is in UTF-8. Dialogues of more than `max_tokens` tokens are skipped.

    Raises:
        UsageError: The file cannot be read or has no dialogues, a line is not a dialogue with a message of the
            assistant (the error gives the line number), or every dialogue was skipped.
    """
    samples: list[Sample] = []
    skipped = 0
    for number, messages in parse_dialogues(path):
        try:
            ids, mask = renderer.dialogue(messages)
        except UsageError as error:
            raise UsageError(f"imitation.file: {path}, line {number}: {error.detail}") from None
        if len(ids) > max_tokens:
            skipped += 1
        else:
            samples.append(unscored_sample(ids, mask, (0,) * len(ids)))
    if not samples:
        reason = f"all {skipped} are longer than rollout.max_tokens ({max_tokens})" if skipped else "the file is empty"
        raise UsageError(f"imitation.file: {path} has no dialogues to learn from: {reason}")
    return Dialogues(samples, skipped)


def parse_dialogues(path: Path) -> list[tuple[int, list[dict[str, str]]]]:
    """Return the line number and the messages of each dialogue in a file.

    Raises:
        UsageError: The file cannot be read, or a line is not a dialogue.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"imitation.file: {path}: {error.strerror or error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages = msgspec.json.decode(line, type=_DialogueLine).messages
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"imitation.file: {path}, line {number} is not a dialogue: {error}") from None
        found.append((number, [{"role": one.role, "content": one.content} for one in messages]))
    return found
