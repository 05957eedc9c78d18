"""The renderer without a chat template, for tiny policies and base models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from envkit.errors import UsageError
from envkit.types import Exchange, Observation, Prompt, Reset

ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that `PlainRenderer` uses."""

    bos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool | None = None
    ) -> str: ...


class PlainRenderer:
    r"""Renders observations without a chat template; a completion is the text between the answer tags.

    The prompt of a turn is ``observation \\n <answer>``. The completion follows, and the prompt of the next turn starts
    with ``</answer>``. A tiny policy thus generates only the move. If each move is a token, one token per turn
    contributes to the loss.

    If ``</answer>`` is several tokens, it cannot stop a completion. The completion then ends at an end-of-text token or
    at the limit ``rollout.turn_tokens``, and the action is the text before the first ``</answer>``.

    Args:
        history: Number of turns in a prompt, including the current one, at least 1; None means all turns.
        eos_ids: End-of-text tokens; they stop a completion if ``</answer>`` is several tokens.
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

    def for_episode(self, start: Reset) -> PlainRenderer:
        """Return this renderer.

        Raises:
            UsageError: The environment has a system prompt or tools, which need a chat template.
        """
        if start.system is not None or start.tools:
            what = "tools" if start.tools else "a system prompt"
            raise UsageError(
                f"the environment has {what}, and the model has no chat template to show them; "
                "name a model with a chat template in engine.model"
            )
        return self

    def open(self, observation: Observation) -> tuple[int, ...]:
        return self._begin + self._frame(observation)

    def extend(self, history: Sequence[Exchange], observation: Observation) -> Prompt:
        if self._history is None:
            return Prompt(self._closing(history[-1].completion_ids) + self._frame(observation))
        ids: tuple[int, ...] = self._begin
        for turn in history[max(0, len(history) - self._history + 1) :]:
            ids += self._frame(turn.observation) + tuple(turn.completion_ids) + self._closing(turn.completion_ids)
        return Prompt(ids + self._frame(observation), starts_sample=True)

    def action(self, token_ids: Sequence[int]) -> str:
        ids = tuple(token_ids)
        if self._ends_closed(ids):
            ids = ids[: -len(self._close)]
        inner = self._tokenizer.decode(ids, skip_special_tokens=True)
        return ANSWER_OPEN + inner.partition(ANSWER_CLOSE)[0] + ANSWER_CLOSE

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of `answer`, such as ``"<answer>up</answer>"``, as a completion of the policy.

        If ``</answer>`` is several tokens, the result includes it, to mark the end of the action.
        """
        inner = answer.removeprefix(ANSWER_OPEN).removesuffix(ANSWER_CLOSE)
        end = self._close if len(self._close) > 1 else ()
        return tuple(self._tokenizer.encode(inner, add_special_tokens=False)) + end

    def _closing(self, completion: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that close an answer; empty if the completion already includes them."""
        closed = self._ends_closed(completion) or (len(self._close) > 1 and ANSWER_CLOSE in self.text(completion))
        return () if closed else self._close

    def _ends_closed(self, completion: Sequence[int]) -> bool:
        return tuple(completion[-len(self._close) :]) == self._close

    def _frame(self, observation: Observation) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(observation.text + "\n", add_special_tokens=False)) + self._open
