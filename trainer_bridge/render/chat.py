"""The renderer for models with a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from envkit.errors import UsageError
from envkit.types import Exchange, Observation, Prompt, Reset, ToolSchema

from ..agents.messages import ChatMessage
from ..thoughts import END_THINK, THINK, without_thoughts
from ..tool_calls import all_calls, canonical_call, describe, hermes, join_prompts, read_call
from .template import ANSWER_MARK, ChatTemplate, Message

_EMPTY_THOUGHT = re.compile(rf"(?:{THINK}\s*(?:{END_THINK}\s*)?|<\|channel>thought\s*<channel\|>)\Z")
_PROBE_TEXT = "a wall"
_PROBE = {"name": "look", "arguments": {"at": _PROBE_TEXT}}
"""A call that shows how the template writes calls."""
_CALL_ID = "call00000"
"""Id of every tool call in a chat. Some templates require nine letters and digits."""
_MAX_EPISODE_RENDERERS = 64


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Support of a chat template for tools.

    Attributes:
        shows_tools: Whether it shows the tools. If not, the system prompt describes them.
        writes_calls: Whether it writes tool calls in a markup that envkit reads. If not, demonstrated calls have the
            markup ``<tool_call>``.
        results: How a tool's result is shown: with the role ``tool`` after any answer (``"tool"``), with this role
            only after an answer that the template itself writes as a call (``"call"``), or as a user message.
    """

    shows_tools: bool
    writes_calls: bool
    results: Literal["tool", "call", "user"]


class ChatRenderer:
    """Renders observations as user messages, or as tools' results, with the model's chat template.

    Normally a turn's prompt continues the previous turn: it contains that turn's prompt, the sampled tokens, and the
    text that the template puts between two answers. If the template renders the earlier turns differently when a turn
    is added, for example because it moves the system prompt or drops thoughts, the turn starts a new sample with the
    whole chat as its prompt. Whitespace that the template strips around an answer does not count as a difference.

    Args:
        system: The system message; None passes no system message to the template, which may then add its own.
        template: Arguments of the template, such as ``{"enable_thinking": False}``.
        thinking: ``"keep"`` leaves thoughts in the prompts of later turns, even if the template would drop them;
            ``"cut"`` removes thoughts from later prompts.
        history: Number of turns in a prompt, including the current one, at least 1; each turn then starts a new sample.
            None means all turns.
        eos_ids: End-of-text tokens of the model's generation config.

    Raises:
        UsageError: The template rejects a message role that a rollout needs, or leaves out its text, or writes tool
            calls in a markup that envkit does not read.
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
        tools: Sequence[ToolSchema] = (),
    ) -> None:
        self._with = partial(
            ChatRenderer, tokenizer, template=template, thinking=thinking, history=history, eos_ids=eos_ids
        )
        self._own_system = system
        self._episodes: dict[tuple[str | None, str], ChatRenderer] = {}
        self._tokenizer = tokenizer
        self._tools = tools
        self._template = ChatTemplate(tokenizer, template or {}, has_tools=bool(tools))
        self._shown_tools: Sequence[ToolSchema] = self._template.escape_all(tools) if tools else ()
        shows_tools = self._render([_user("?")]) != self._template.render([_user("?")])
        if tools and not shows_tools:
            system = join_prompts(system, describe(tools))
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._keeps_thoughts = thinking == "keep"
        self._history = history
        ask = [*self._system, _user(ANSWER_MARK)]
        prompt = self._render(ask)
        self._check_shown("user", prompt)
        if self._system:
            self._check_shown("system", self._render([{"role": "system", "content": ANSWER_MARK}, _user("?")]))
        # What follows the last message: the start of the answer, also in a template that always adds it.
        begun = (prompt.removeprefix(self._render(ask, prompting=False)) or prompt).rpartition(ANSWER_MARK)[2]
        self._opens_thought = THINK in begun and END_THINK not in begun.rpartition(THINK)[2]
        ask[-1] = _user("?")
        _, found, after = self._render([*ask, _assistant(ANSWER_MARK), _user("?")]).rpartition(ANSWER_MARK)
        following = self._template.encode(after.lstrip())[:1] if found else ()
        end = tuple(token for token in following if token in self._template.added_ids)
        eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self._end = end or eos
        self._end_text = self.text(self._end)
        self.stop: tuple[int, ...] = tuple(dict.fromkeys((*end, *eos_ids, *eos)))
        """Tokens that end a completion. They are the end-of-text tokens of the generation config and of the tokenizer,
        and the token that follows an answer in the template, if it is an added token.
        """
        special = self._template.special_ids.items()
        self._hidden = {number for number, name in special if name not in self._template.answer_tokens}
        writes_calls = self._written_call(_PROBE) is not None
        self.support = ToolSupport(shows_tools, writes_calls, self._results())
        if tools and shows_tools and not writes_calls:
            self._refuse_unread_markup()

    @property
    def reads_clock(self) -> bool:
        """Whether the template writes the current date or time into the prompts."""
        try:
            arguments = {**self._template.arguments, "strftime_now": "not a function"}
            ChatTemplate(self._tokenizer, arguments).render([*self._system, _user("?")])
        except UsageError:  # it was called
            return True
        return False

    def for_episode(self, start: Reset) -> ChatRenderer:
        """Return the renderer of an episode; see `envkit.protocols.Renderer.for_episode`.

        The episode's system prompt is the one of this renderer and then that of the environment. Episodes with the
        same system prompt and tools share a renderer.
        """
        if start.system is None and not start.tools:
            return self
        key = (start.system, json.dumps(start.tools))
        if key not in self._episodes:
            system = join_prompts(self._own_system, start.system)
            self._remember(key, self._with(system=system, tools=start.tools))
        return self._episodes[key]

    def _remember(self, key: tuple[str | None, str], made: ChatRenderer) -> None:
        if len(self._episodes) == _MAX_EPISODE_RENDERERS:
            del self._episodes[next(iter(self._episodes))]
        self._episodes[key] = made

    def for_tools(self, tools: Sequence[ToolSchema]) -> ChatRenderer:
        """Return the renderer of an agent's chats with `tools`. Its system prompt is only a description of the tools,
        if the template does not show them.
        """
        key = (None, json.dumps(["agent", *tools]))
        if key not in self._episodes:
            self._remember(key, self._with(tools=tools))
        return self._episodes[key]

    # --- Chats of agents ----------------------------------------------------------------------------------------------

    def chat(self, messages: Sequence[ChatMessage], begun: str = "") -> tuple[int, ...]:
        """Return the prompt for an answer to `messages` that begins with the text `begun`.

        Raises:
            UsageError: The template rejects the messages, or shows no answer that has begun, since it opens a thought.
        """
        if begun and self._opens_thought:
            raise UsageError("the model's chat template begins every answer with a thought; send no begun answer")
        return self._prompt(self._shown(messages)) + self.plain(begun)

    def plain(self, text: str) -> tuple[int, ...]:
        """Return text inside an answer as tokens, without special tokens."""
        return self._template.encode(self._template.escape(text, "tool"))

    def between(
        self, messages: Sequence[ChatMessage], answer_ids: Sequence[int], after: Sequence[ChatMessage]
    ) -> tuple[int, ...] | None:
        """Return the tokens between an answer and the next one; None if the template then renders the chat otherwise.

        Args:
            messages: The chat up to the answer, which is the last message.
            answer_ids: The tokens of the answer.
            after: The messages after it; at least one.
        """
        shown = self._shown(messages)
        if "tool_calls" not in shown[-1]:
            shown[-1] = self._answer(self._words(answer_ids))
        return self._frame(shown, answer_ids, self._shown(after, is_start=False))

    def read(self, token_ids: Sequence[int]) -> tuple[str, str, list[str]]:
        """Return the text of an answer without thoughts and calls, its thoughts, and its calls as canonical JSON."""
        words = self._words(token_ids)
        spoken = without_thoughts(words, is_thinking=self._opens_thought)
        thought = words.removesuffix(spoken).strip().removeprefix(THINK).removesuffix(END_THINK).strip()
        content, calls = all_calls(spoken, self._tools) if self._tools else (spoken, [])
        return content, thought, calls

    def _shown(self, messages: Sequence[ChatMessage], *, is_start: bool = True) -> list[Message]:
        shown: list[Message] = []
        described = [*self._system] if is_start else []
        if described and messages and messages[0].role == "system":
            text = join_prompts(messages[0].content, described[0]["content"]) or ""
            described, messages = [{"role": "system", "content": text}], messages[1:]
        for one in messages:
            if one.role == "assistant" and one.calls:
                calls = [{"name": call.name, "arguments": call.arguments} for call in one.calls]
                if self.support.results == "call":
                    shown.append({**_calling(*map(self._template.escape_all, calls)), "content": one.content})
                else:
                    written = [self._written_call(call) or hermes(json.dumps(call)) for call in calls]
                    shown.append(_assistant("\n".join(filter(None, [one.content, *written]))))
            elif one.role == "tool":
                shown.append(_user(one.content) if self.support.results == "user" else _result(one.content))
            else:
                shown.append({"role": one.role, "content": one.content})
        return [*described, *shown]

    # --- Episodes -----------------------------------------------------------------------------------------------------

    def open(self, observation: Observation) -> tuple[int, ...]:
        return self._prompt([*self._system, _user(observation.text)])

    def extend(self, history: Sequence[Exchange], observation: Observation) -> Prompt:
        kept = history if self._history is None else history[max(0, len(history) - self._history + 1) :]
        seen = [*(turn.observation for turn in kept), observation]
        chat = [*self._system, _user(seen[0].text)]
        for turn, after in zip(kept, seen[1:], strict=True):
            chat += self._exchange(self._words(turn.completion_ids), after)
        if self._history is None:
            frame = self._frame(chat[:-1], history[-1].completion_ids, chat[-1:])
            if frame is not None:
                return Prompt(frame)
        return Prompt(self._prompt(chat), starts_sample=True)

    def action(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens and thoughts; see `without_thoughts`.

        In an episode with tools, it is the first call as canonical JSON, if there is a complete one.
        """
        text = without_thoughts(self._words(token_ids), is_thinking=self._opens_thought)
        return (canonical_call(text, self._tools) if self._tools else None) or text

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of `answer` as a completion of the policy, including the end token.

        In an episode with tools, a call in JSON becomes a call in the model's own markup.
        """
        text = self._template.escape(answer, "assistant")
        if self._tools and (call := read_call(answer)) is not None:
            text = self._written_call(call) or hermes(self._template.escape(answer, "tool"))
        if self._opens_thought and END_THINK not in text:
            text = f"{END_THINK}\n\n{text}"
        return self._template.encode(text) + self._end

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
            frame = self._frame(before, answer, question) if start else None
            if frame is None:
                frame = self._prompt([*before, *question])
                ids, mask = (), ()
            answer = self.demonstrate(chat[index]["content"])
            ids += frame + answer
            mask += (0,) * len(frame) + (1,) * len(answer)
            before += [*question, self._answer(self._words(answer))]
        return ids, mask

    def _frame(
        self, chat: Sequence[Message], answer_ids: Sequence[int], after: Sequence[Message]
    ) -> tuple[int, ...] | None:
        """Return the tokens between two answers; None if `after` changes how the template renders the chat before it.

        `chat` ends with the first of the two answers. The result omits the end-of-turn token if this answer has it.
        """
        *before, first = chat
        answer, is_call = self._words(answer_ids), "tool_calls" in first
        prompt = self._render(before)
        marked = _calling({"name": ANSWER_MARK, "arguments": {}}) if is_call else _assistant(ANSWER_MARK)
        start, found, frame = self._render([*before, marked, *after]).rpartition(ANSWER_MARK)
        if is_call:
            start, frame = prompt, self._end_text + frame.partition(self._end_text)[2]
        whole = self._render([*chat, *after])
        if not found or len(whole) < len(start) + len(frame) or not (whole.startswith(start) and whole.endswith(frame)):
            return None
        rendered, sampled = whole[len(start) : len(whole) - len(frame)], self._template.escape(answer, "assistant")
        if self._keeps_thoughts:
            prompt, start = _EMPTY_THOUGHT.sub("", prompt), _EMPTY_THOUGHT.sub("", start)
            rendered, sampled = without_thoughts(rendered), without_thoughts(sampled, is_thinking=self._opens_thought)
        if is_call:  # the template may write the same call with other whitespace
            rendered, sampled = self._answer(answer)["content"], answer
        if prompt.rstrip() != start.rstrip() or rendered.strip() != sampled.strip():
            return None
        ids = self._template.encode(frame.lstrip())
        return ids[1:] if answer_ids and ids[:1] == tuple(answer_ids[-1:]) else self._template.encode(frame)

    def _results(self) -> Literal["tool", "call", "user"]:
        """Return how the template shows the results of tools in a chat with two of them."""
        ask, results = [*self._system, _user("?")], [_result("first result"), _result("second result")]
        call = _calling({"name": "look", "arguments": {}})
        answers: Mapping[Literal["tool", "call"], Message] = {"tool": _assistant("?"), "call": call}
        for kind, answer in answers.items():
            try:
                shown = self._render([*ask, answer, results[0], answer, results[1]])
            except UsageError:
                continue
            if self._end and all(result["content"] in shown for result in results):
                return kind
        return "user"

    def _written_call(self, call: Mapping[str, Any]) -> str | None:
        """Return `call` as the template writes it, with markers; None if envkit does not read the template's markup."""
        start = _EMPTY_THOUGHT.sub("", self._render([_user("?")])).rstrip()
        try:
            message = _calling(self._template.escape_all(call))
            whole = self._render([_user("?"), message], prompting=False)
        except UsageError:
            return None
        if not self._end or not whole.startswith(start):
            return None
        text = without_thoughts(whole[len(start) :].partition(self._end_text)[0]).strip()
        read = canonical_call(self._template.unescape(text), self._tools)
        return text if read is not None and read_call(read) == call else None

    def _refuse_unread_markup(self) -> None:
        """Raise an error if the template writes calls, and none of the markups that envkit reads."""
        try:
            whole = self._render([_user(ANSWER_MARK), _calling(_PROBE)], prompting=False)
        except UsageError:
            return
        written = whole.rpartition(ANSWER_MARK)[2].rpartition(self._end_text or "\n")[0]
        is_read = canonical_call(written) or canonical_call(written[written.find("{") :])
        if _PROBE_TEXT in written and not is_read:
            raise UsageError(
                f"the model's chat template writes tool calls in a markup that envkit does not read: {written!r}; use "
                "another model, or play this one behind an endpoint that reads them (--policy openai:MODEL@URL)"
            )

    def _check_shown(self, role: str, prompt: str) -> None:
        if ANSWER_MARK not in prompt:
            raise UsageError(f"the model's chat template leaves out the text of a message with the role {role}")

    def _exchange(self, answer: str, after: Observation) -> list[Message]:
        """Return the messages of an answer of the policy and of the observation after it."""
        kind = self.support.results if after.role == "tool" else "user"
        spoken = without_thoughts(answer, is_thinking=self._opens_thought)
        call = read_call(canonical_call(spoken, self._tools) or "") if kind == "call" else None
        if call is not None:
            return [_calling(self._template.escape_all(call)), _result(after.text)]
        return [self._answer(answer), _result(after.text) if kind == "tool" else _user(after.text)]

    def _render(self, chat: Sequence[Message], *, prompting: bool = True) -> str:
        return self._template.render(chat, prompting=prompting, tools=self._shown_tools)

    def _prompt(self, chat: Sequence[Message]) -> tuple[int, ...]:
        return self._template.encode(self._render(chat))

    def _answer(self, text: str) -> Message:
        """Return an answer of the policy as an assistant's message for later prompts."""
        return _assistant(text if self._keeps_thoughts else without_thoughts(text, is_thinking=self._opens_thought))

    def _words(self, token_ids: Sequence[int]) -> str:
        return self.text([token for token in token_ids if token not in self._hidden])


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _result(content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": _CALL_ID}


def _calling(*calls: Mapping[str, Any]) -> Message:
    made = [{"id": _CALL_ID, "type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": made}
