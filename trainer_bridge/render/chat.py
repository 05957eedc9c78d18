"""The renderer for models with a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from envkit.errors import UsageError
from envkit.types import Exchange, Observation, Prompt, Reset

from ..thoughts import END_THINK, THINK, without_thoughts
from .template import ANSWER_MARK, ChatTemplate, Message

_EMPTY_THOUGHT = re.compile(rf"{THINK}\s*(?:{END_THINK}\s*)?\Z")


class ChatRenderer:
    """Renders observations as user messages with the model's chat template.

    Normally a turn's prompt continues the previous turn: it contains that turn's prompt, the sampled tokens, and the
    text that the template puts between two answers. If the template renders the earlier turns differently when a turn
    is added, for example because it moves the system prompt or drops thoughts, the turn starts a new sample with the
    whole chat as its prompt. Whitespace that the template strips around an answer does not count as a difference.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        system: The system message; None passes no system message to the template, which may then add its own.
        template: Arguments of the template, such as ``{"enable_thinking": False}``.
        thinking: ``"keep"`` leaves thoughts in the prompts of later turns, even if the template would drop them;
            ``"cut"`` removes thoughts from later prompts.
        history: Number of turns in a prompt, including the current one, at least 1; each turn then starts a new sample.
            None means all turns.
        eos_ids: End-of-text tokens of the model's generation config.

    Raises:
        UsageError: The template rejects a message role that a rollout needs.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
        thinking: Literal["keep", "cut"] = "keep",
        history: int | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template or {})
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._keeps_thoughts = thinking == "keep"
        self._history = history
        ask = [*self._system, _user("?")]
        prompt = self._template.render(ask)
        self._opens_thought = END_THINK not in prompt.rpartition(THINK)[2] and THINK in prompt
        _, found, after = self._template.render([*ask, _assistant(ANSWER_MARK), _user("?")]).rpartition(ANSWER_MARK)
        following = self._template.encode(after.lstrip())[:1] if found else ()
        end = tuple(token for token in following if token in self._template.added_ids)
        eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self._end = end or eos
        self.stop: tuple[int, ...] = tuple(dict.fromkeys((*end, *eos_ids, *eos)))
        """Tokens that end a completion. They are the end-of-text tokens of the generation config and of the tokenizer,
        and the token that follows an answer in the template, if it is an added token.
        """
        self._hidden = {number for number, name in self._template.special_ids.items() if name not in (THINK, END_THINK)}

    def for_episode(self, start: Reset) -> ChatRenderer:
        return self

    def open(self, observation: Observation) -> tuple[int, ...]:
        return self._prompt([*self._system, _user(observation.text)])

    def extend(self, history: Sequence[Exchange], observation: Observation) -> Prompt:
        kept = history if self._history is None else history[max(0, len(history) - self._history + 1) :]
        chat = list(self._system)
        for turn in kept:
            chat += [_user(turn.observation.text), self._answer(self._words(turn.completion_ids))]
        if self._history is None:
            frame = self._frame(chat[:-1], history[-1].completion_ids, [_user(observation.text)])
            if frame is not None:
                return Prompt(frame)
        return Prompt(self._prompt([*chat, _user(observation.text)]), starts_sample=True)

    def action(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens and thoughts; see `without_thoughts`."""
        return without_thoughts(self._words(token_ids), is_thinking=self._opens_thought)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of `answer` as a completion of the policy, including the end token."""
        if self._opens_thought and END_THINK not in answer:
            answer = f"{END_THINK}\n\n{answer}"
        return self._template.encode(self._template.escape(answer, "assistant")) + self._end

    def dialogue(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that a dialogue has in a rollout, and a mask that is 1 on answers and their end tokens.

        A dialogue without a system prompt gets the renderer's system prompt. Messages after the last answer are
        omitted. Where the template renders earlier turns differently, a rollout starts a new sample. In this case, only
        the last sample is returned; earlier answers are part of its prompt and have mask 0.

        Args:
            messages: The messages, each with a ``role`` (system, user or assistant) and a ``content``.

        Raises:
            UsageError: There is no answer, or the template rejects the dialogue.
        """
        chat = [*([] if any(one["role"] == "system" for one in messages) else self._system), *messages]
        answers = [index for index, one in enumerate(chat) if one["role"] == "assistant"]
        if not answers:
            raise UsageError("the dialogue has no message of the assistant; add one")
        ids: tuple[int, ...] = ()
        mask: tuple[int, ...] = ()
        answer: tuple[int, ...] = ()
        before: list[Message] = []
        for start, index in zip([0, *(index + 1 for index in answers)], answers, strict=False):
            question = chat[start:index]
            frame = self._frame(before[:-1], answer, question) if start else None
            if frame is None:
                frame = self._prompt([*before, *question])
                ids, mask = (), ()
            answer = self.demonstrate(chat[index]["content"])
            ids += frame + answer
            mask += (0,) * len(frame) + (1,) * len(answer)
            before += [*question, self._answer(self._words(answer))]
        return ids, mask

    def _frame(
        self, before: Sequence[Message], answer_ids: Sequence[int], after: Sequence[Message]
    ) -> tuple[int, ...] | None:
        """Return the tokens between two answers; None if `after` changes how the template renders the chat before it.

        Args:
            before: The chat before the first of the two answers.
            answer_ids: Tokens of this answer. If they end with the end-of-turn token, the result omits that token.
            after: The messages between the two answers.
        """
        answer = self._words(answer_ids)
        prompt = self._template.render(before)
        start, found, frame = self._template.render([*before, _assistant(ANSWER_MARK), *after]).rpartition(ANSWER_MARK)
        whole = self._template.render([*before, self._answer(answer), *after])
        if not found or len(whole) < len(start) + len(frame) or not (whole.startswith(start) and whole.endswith(frame)):
            return None
        rendered, sampled = whole[len(start) : len(whole) - len(frame)], self._template.escape(answer, "assistant")
        if self._keeps_thoughts:
            prompt, start = _EMPTY_THOUGHT.sub("", prompt), _EMPTY_THOUGHT.sub("", start)
            rendered, sampled = without_thoughts(rendered), without_thoughts(sampled, is_thinking=self._opens_thought)
        if prompt.rstrip() != start.rstrip() or rendered.strip() != sampled.strip():
            return None
        ids = self._template.encode(frame.lstrip())
        return ids[1:] if answer_ids and ids[:1] == tuple(answer_ids[-1:]) else self._template.encode(frame)

    def _prompt(self, chat: Sequence[Message]) -> tuple[int, ...]:
        return self._template.encode(self._template.render(chat))

    def _answer(self, text: str) -> Message:
        """Return an answer of the policy as an assistant's message for later prompts."""
        return _assistant(text if self._keeps_thoughts else without_thoughts(text, is_thinking=self._opens_thought))

    def _words(self, token_ids: Sequence[int]) -> str:
        return self.text([token for token in token_ids if token not in self._hidden])


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
