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
from envkit.types import ToolSchema

from ..thoughts import END_THINK, THINK
from ..tool_calls import MARKUP_TOKENS

ANSWER_MARK = "@@envkit-answer@@"
"""Placeholder for an answer, which shows the position of the answer in the rendered text."""

_MARK = "@@envkit-"
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>")
"""Tokens that together only templates in the format harmony have."""

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders and encodes chats with the template of a tokenizer.

    Args:
        has_tools: Whether the policy may call tools, so that the tokens of its markup are part of its answers.

    Raises:
        UsageError: The template has a format that envkit does not read.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any], *, has_tools: bool = False) -> None:
        if all(token in str(tokenizer.chat_template) for token in _HARMONY):
            raise UsageError(
                "the model's chat template has the format harmony (gpt-oss), whose channels and tool calls envkit does "
                "not read; play the model behind an endpoint (--policy openai:MODEL@URL)"
            )
        self._tokenizer = tokenizer
        self.arguments = dict(arguments)
        self.answer_tokens = (THINK, END_THINK, *(MARKUP_TOKENS if has_tools else ()))
        """Special tokens that the policy may use in its answers. If an earlier answer is rendered again, they are
        special even where the policy spelled them as plain text.
        """
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.added_ids = special | set(added)
        self.special_ids = {number: tokenizer.convert_ids_to_tokens(number) for number in special}
        names = sorted(self.special_ids.values(), key=lambda name: (-len(name), name))
        self._frame_tokens = re.compile("(" + ("|".join(map(re.escape, names)) or "(?!)") + ")")
        self._escaped = [*names, _MARK]
        self._escapes = re.compile("|".join(map(re.escape, self._escaped)))
        self._marks = re.compile(re.escape(_MARK) + r"(\d+)@@")

    def render(self, messages: Sequence[Message], *, prompting: bool = True, tools: Sequence[ToolSchema] = ()) -> str:
        """Return the text of a chat, with markers for special tokens in message contents.

        Args:
            messages: The messages, each with a role and a content. Tool calls in messages are not changed: pass their
                texts through `escape_all`.
            prompting: Whether to end the text with the start of the model's answer.
            tools: The tools to show, passed through `escape_all`.

        Raises:
            UsageError: The template rejects these messages.
        """
        chat = [{**one, "content": self.escape(one["content"], one["role"])} for one in messages]
        render = self._tokenizer.apply_chat_template
        try:
            shown = {"tools": [*tools]} if tools else {}
            return str(render(chat, tokenize=False, add_generation_prompt=prompting, **shown, **self.arguments))
        except (TemplateError, TypeError) as error:
            roles = ", ".join(one["role"] for one in messages)
            raise UsageError(f"the model's chat template rejects a chat of {roles}: {error}") from None

    def escape(self, content: str, role: str) -> str:
        """Replace special tokens in `content` with markers, except `answer_tokens` in an assistant's message."""
        if content is ANSWER_MARK:
            return content
        kept = self.answer_tokens if role == "assistant" else ()
        return self._escapes.sub(lambda found: found[0] if found[0] in kept else self._mark(found[0]), content)

    def escape_all(self, value: Any) -> Any:
        """Replace special tokens in all texts of a JSON value with markers."""
        if isinstance(value, Mapping):
            return {self.escape(key, "tool"): self.escape_all(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape_all(one) for one in value]
        return self.escape(value, "tool") if isinstance(value, str) else value

    def unescape(self, text: str) -> str:
        """Return `text` with the special tokens in place of their markers."""
        return self._marks.sub(lambda mark: self._escaped[int(mark[1])], text)

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
                ids += self._encode(whole) + self._encode_inside(self.unescape(piece))
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
