"""A model's chat template: converts messages to text and text to tokens. Messages cannot inject special tokens.

The content of a message may contain the text of a special token, such as ``<|im_end|>`` in the output of a command.
Before rendering, a marker replaces this text, so all special tokens in the rendered text come from the template. When
the rendered text is encoded, the original text takes the marker's place and is encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from envkit.errors import UsageError

from ..thoughts import END_THINK, THINK

ANSWER_MARK = "@@envkit-answer@@"
"""Placeholder for an answer, which shows the position of the answer in the rendered text."""

_MARK = "@@envkit-"

Message = Mapping[str, str]


class ChatTemplate:
    """Renders and encodes chats with the template of a tokenizer.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        arguments: Arguments of the template, such as ``{"enable_thinking": False}``.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.added_ids = special | set(added)
        self.special_ids = {number: tokenizer.convert_ids_to_tokens(number) for number in special}
        names = sorted(self.special_ids.values(), key=lambda name: (-len(name), name))
        self._frame_tokens = re.compile("(" + ("|".join(map(re.escape, names)) or "(?!)") + ")")
        self._escaped = [*names, _MARK]
        self._escapes = re.compile("|".join(map(re.escape, self._escaped)))
        self._marks = re.compile(re.escape(_MARK) + r"(\d+)@@")

    def render(self, messages: Sequence[Message], *, prompting: bool = True) -> str:
        """Return the text of a chat, with markers for special tokens in message contents.

        Args:
            messages: The messages, each with a role and a content.
            prompting: Whether to end the text with the start of the model's answer.

        Raises:
            UsageError: The template rejects these messages.
        """
        chat = [{**one, "content": self.escape(one["content"], one["role"])} for one in messages]
        render = self._tokenizer.apply_chat_template
        try:
            return str(render(chat, tokenize=False, add_generation_prompt=prompting, **self._arguments))
        except TemplateError as error:
            roles = ", ".join(one["role"] for one in messages)
            raise UsageError(f"the model's chat template rejects a chat of {roles}: {error}") from None

    def escape(self, content: str, role: str) -> str:
        """Replace special tokens in `content` with markers, except the thinking tags of an assistant's message."""
        if content is ANSWER_MARK:
            return content
        kept = (THINK, END_THINK) if role == "assistant" else ()
        return self._escapes.sub(lambda found: found[0] if found[0] in kept else self._mark(found[0]), content)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of rendered text.

        Text without markers is encoded as a whole. Otherwise, the text is split at the special tokens of the template,
        and each part that contains a marker is encoded separately, as plain text.
        """
        if _MARK not in text:
            return self._encode(text)
        ids: tuple[int, ...] = ()
        whole = ""
        for piece in self._frame_tokens.split(text):
            if _MARK in piece:
                plain = self._marks.sub(lambda mark: self._escaped[int(mark[1])], piece)
                ids += self._encode(whole) + self._encode_inside(plain)
                whole = ""
            else:
                whole += piece
        return ids + self._encode(whole)

    def _encode_inside(self, text: str) -> tuple[int, ...]:
        """Encode plain text after a newline, then drop the newline, which stops tokenizers from inserting a space."""
        newline = self._encode("\n")
        ids = self._encode("\n" + text, split_special_tokens=True)
        if ids[: len(newline)] == newline:
            return ids[len(newline) :]
        return self._encode(text, split_special_tokens=True)

    def _mark(self, name: str) -> str:
        return f"{_MARK}{self._escaped.index(name)}@@"

    def _encode(self, text: str, **options: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, **options)) if text else ()
