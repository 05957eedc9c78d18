"""Words to tokens and back, one turn at a time. Tokens are append-only: nothing is decoded and encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from envkit.types import Observation

ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"


class Tokenizer(Protocol):
    """The little that a renderer needs of a Hugging Face tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool | None = None
    ) -> str: ...


def _text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return tokens as text, special tokens included and no space removed."""
    return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class PlainRenderer:
    r"""Frames an observation without any template: the engine writes what stands between the answer tags.

    A turn reads ``observation \\n <answer>``; the completion follows, and the next turn begins with ``</answer>``. So a
    tiny policy spends its tokens on the move alone: with one token a move, one token a turn carries loss.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._open = tuple(tokenizer.encode(ANSWER_OPEN, add_special_tokens=False))
        self._close = tuple(tokenizer.encode(ANSWER_CLOSE, add_special_tokens=False))
        self._begin = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)

    @property
    def stop(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        return self._close if len(self._close) == 1 else ()

    def open(self, observation: Observation) -> tuple[int, ...]:
        return self._begin + self._frame(observation)

    def extend(self, said: Sequence[int], observation: Observation) -> tuple[int, ...]:
        closed = tuple(said[-len(self._close) :]) == self._close
        return (() if closed else self._close) + self._frame(observation)

    def action(self, said: Sequence[int]) -> str:
        ids = tuple(said)
        if ids[-len(self._close) :] == self._close:
            ids = ids[: -len(self._close)]
        return ANSWER_OPEN + self._tokenizer.decode(ids, skip_special_tokens=True) + ANSWER_CLOSE

    def text(self, token_ids: Sequence[int]) -> str:
        return _text(self._tokenizer, token_ids)

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        """Return the tokens with which a policy would say `answer`, such as ``"<answer>up</answer>"``."""
        inner = answer.removeprefix(ANSWER_OPEN).removesuffix(ANSWER_CLOSE)
        return tuple(self._tokenizer.encode(inner, add_special_tokens=False))

    def _frame(self, observation: Observation) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(observation.text + "\n", add_special_tokens=False)) + self._open


class ChatRenderer:
    """Frames observations as the user's messages of the model's own chat template.

    What follows a completion is cut out of a rendered three-message chat once, behind a marker that stands for the
    completion, so a template that drops or rewrites earlier messages does not rewrite tokens that were sampled.
    """

    _MARKER = "@@envkit-completion@@"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def stop(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        return () if self._tokenizer.eos_token_id is None else (self._tokenizer.eos_token_id,)

    def open(self, observation: Observation) -> tuple[int, ...]:
        return self._encode(self._render([{"role": "user", "content": observation.text}]))

    def extend(self, said: Sequence[int], observation: Observation) -> tuple[int, ...]:
        chat = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": self._MARKER},
            {"role": "user", "content": observation.text},
        ]
        ids = self._encode(self._render(chat).rpartition(self._MARKER)[2])
        return ids[1:] if said and ids[:1] == tuple(said[-1:]) else ids

    def action(self, said: Sequence[int]) -> str:
        return self._tokenizer.decode(said, skip_special_tokens=True)

    def text(self, token_ids: Sequence[int]) -> str:
        return _text(self._tokenizer, token_ids)

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        """Return the tokens with which a policy would say `answer`, its end included."""
        return self._encode(answer) + self.stop

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, chat: list[dict[str, str]]) -> str:
        template = cast(Any, self._tokenizer).apply_chat_template
        return str(template(chat, tokenize=False, add_generation_prompt=True))
