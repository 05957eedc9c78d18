"""Prompts without a chat template, for policies that are made from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from envkit.types import Exchange, Observation, Prompt

ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"


class Tokenizer(Protocol):
    """What `PlainRenderer` needs of a Hugging Face tokenizer."""

    bos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool | None = None
    ) -> str: ...


class PlainRenderer:
    r"""Frames an observation without any template: the engine writes what stands between the answer tags.

    A turn reads ``observation \\n <answer>``; the completion follows, and the next turn begins with ``</answer>``. So a
    tiny policy spends its tokens on the move alone: with one token a move, one token a turn carries loss.

    Where ``</answer>`` is several tokens, it stops no completion: the policy goes on until the end of its text or
    `turn_tokens`, and the action is what stands before the first ``</answer>``.

    Args:
        tokenizer: Encodes and decodes.
        history: Number of newest turns that a prompt holds, at least 1; None keeps all.
        eos_ids: Tokens that end the model's text; they stop a completion where ``</answer>`` is several tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, history: int | None = None, eos_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._history = history
        self._eos_ids = tuple(eos_ids)
        self._open = tuple(tokenizer.encode(ANSWER_OPEN, add_special_tokens=False))
        self._close = tuple(tokenizer.encode(ANSWER_CLOSE, add_special_tokens=False))
        self._begin = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)

    @property
    def stop(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        return self._close if len(self._close) == 1 else self._eos_ids

    def open(self, observation: Observation) -> tuple[int, ...]:
        return self._begin + self._frame(observation)

    def extend(self, history: Sequence[Exchange], observation: Observation) -> Prompt:
        if self._history is None:
            return Prompt(self._closing(history[-1].said) + self._frame(observation))
        ids: tuple[int, ...] = self._begin
        for turn in history[max(0, len(history) - self._history + 1) :]:
            ids += self._frame(turn.observation) + tuple(turn.said) + self._closing(turn.said)
        return Prompt(ids + self._frame(observation), starts_sample=True)

    def action(self, said: Sequence[int]) -> str:
        said = tuple(said)
        if self._ends_closed(said):
            said = said[: -len(self._close)]
        inner = self._tokenizer.decode(said, skip_special_tokens=True)
        return ANSWER_OPEN + inner.partition(ANSWER_CLOSE)[0] + ANSWER_CLOSE

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        """Return the tokens with which a policy would say `answer`, such as ``"<answer>up</answer>"``.

        The closing tag is among them where it is several tokens, since the action ends there.
        """
        inner = answer.removeprefix(ANSWER_OPEN).removesuffix(ANSWER_CLOSE)
        end = self._close if len(self._close) > 1 else ()
        return tuple(self._tokenizer.encode(inner, add_special_tokens=False)) + end

    def _closing(self, said: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that close an answer; none where the completion closed it itself."""
        closed = self._ends_closed(said) or (len(self._close) > 1 and ANSWER_CLOSE in self.text(said))
        return () if closed else self._close

    def _ends_closed(self, said: Sequence[int]) -> bool:
        return tuple(said[-len(self._close) :]) == self._close

    def _frame(self, observation: Observation) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(observation.text + "\n", add_special_tokens=False)) + self._open
