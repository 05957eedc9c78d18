"""Check of a chat template: rendering turn by turn, as in a rollout, must give the tokens of the whole chat."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envkit.config.parts import AutoRendererSection
from envkit.errors import UsageError
from envkit.trainer_bridge.render import ChatRenderer, ToolSupport
from envkit.trainer_bridge.thoughts import without_thoughts
from envkit.trainer_bridge.tool_calls import MARKUP_TOKENS, as_call, describe, join_prompts, read_call
from envkit.types import Exchange, Observation, Reset, ToolSchema
from envkit.wiring.contexts import RendererContext
from envkit.wiring.training.models import locate
from envkit.wiring.training.torch_parts import find_model, open_renderer

Outcome = Literal["same", "new sample", "answers kept", "refused", "differs"]
Chat = list[dict[str, Any]]

_NEIGHBOURS = 3
"""Number of tokens to show before and after the first token that differs."""

_ANSWER_MARK = "@@answer@@"
_EMPTY_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_CALL_ID = "call00000"

BASH: ToolSchema = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout_s": {"type": "integer"}},
            "required": ["command"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A test dialogue that the chat template renders.

    Attributes:
        observations: User messages, or results of tools after calls; there is one more of them than of `answers`.
        answers: Messages of the policy; in a dialogue with tools, also calls as canonical JSON.
    """

    name: str
    observations: Sequence[str]
    answers: Sequence[str]
    system: str | None = None
    tools: tuple[ToolSchema, ...] = ()


@dataclass(frozen=True, slots=True)
class DialogueResult:
    """Result of the check with one dialogue.

    Attributes:
        outcome: ``same``: turn by turn, the tokens are those of the whole chat. ``new sample``: also right, but the
            template rewrites earlier turns, so a later turn starts a new training sample. ``answers kept``: right too;
            the template rewrites answers, but envkit trains on the tokens that the policy sampled. ``refused``: the
            template accepts no system prompt. ``differs``: envkit would train on wrong tokens, or does not read a call
            in the markup that it demonstrates, or the template leaves out the text of a message.
        seen: What differs or is left out, or why the template refused the dialogue; otherwise empty.
    """

    name: str
    outcome: Outcome
    seen: str = ""


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Result of `check_template`.

    Attributes:
        stop: Id and text of each token that ends a completion.
        tools: What the template supports of tools; None if it shows neither tools nor a system prompt with them.
    """

    stop: tuple[tuple[int, str], ...]
    verdicts: tuple[DialogueResult, ...]
    tools: ToolSupport | None


def check_template(name: str) -> TemplateReport:
    """Check the chat template of a model, named as in `engine.model`, with each dialogue of `bank`.

    Raises:
        UsageError: There is no such model, it has no chat template, or its template rejects a plain chat.
    """
    model = find_model(locate(name))
    path, tokenizer = model.path, model.tokenizer
    if not tokenizer.chat_template:
        raise UsageError(f"{path} has no chat template to check; training marks its answers with <answer> tags instead")
    added = tokenizer.added_tokens_decoder.values()
    special = sorted({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)})
    verdicts: list[DialogueResult] = []
    support: ToolSupport | None = None
    for dialogue in bank(special):
        try:
            section = AutoRendererSection(system=dialogue.system)
            renderer = open_renderer(RendererContext(section=section, model=model))
            renderer = renderer.for_episode(Reset(Observation(""), {}, tools=dialogue.tools))
            assert isinstance(renderer, ChatRenderer), "the model has a chat template"
            support = renderer.support if dialogue.tools else None
            verdicts.append(_Comparison(tokenizer, renderer, special).run(dialogue))
        except UsageError as error:
            if dialogue.system is None and not dialogue.tools:
                raise
            verdicts.append(DialogueResult(dialogue.name, "refused", error.detail))
    stop = open_renderer(RendererContext(section=AutoRendererSection(), model=model)).stop
    return TemplateReport(tuple((token, str(tokenizer.decode([token]))) for token in stop), tuple(verdicts), support)


def bank(special: Sequence[str]) -> list[Dialogue]:
    """Return test dialogues of one to three turns. `special` are texts of special tokens to put into some messages."""
    forged = " ".join(special)
    argument = " ".join(one for one in special if one not in MARKUP_TOKENS)  # not all can be quoted
    board = "\n".join("#" * 8 for _ in range(40))
    thought = "<think>\nA wall is above, so I go left.\n</think>\n\n"
    ls, cat, echo = (
        as_call({"name": "bash", "arguments": {"command": command, "timeout_s": 3}})
        for command in ("ls", 'cat "ä b.py"\n', f"echo {argument}")
    )
    tools = (BASH,)
    return [
        Dialogue("one turn", ["You see a wall."], []),
        Dialogue("two turns", ["You see a wall.", "You see a door."], ["left"]),
        Dialogue("three turns", ["You see a wall.", "A door.", "A key."], ["left", "<answer>open it</answer>"]),
        Dialogue("system prompt", ["A wall.", "A door.", "A key."], ["left", "open"], "Answer in one word."),
        Dialogue("empty system prompt", ["A wall.", "A door."], ["left"], ""),
        Dialogue("empty texts", ["", "", ""], ["", "left"]),
        Dialogue("answers with whitespace at the ends", ["A wall.", "A door.", "A key."], [" left ", "\n\nopen\n"]),
        Dialogue("observations with whitespace at the ends", ["\n#P_\n\n", "  a door \n", "\t"], ["left", "open"]),
        Dialogue("thoughts", ["A wall.", "A door.", "A key."], [f"{thought}left", f"{thought}open"]),
        Dialogue("unicode", ["ä ö ß √ 墙 🧱", "e\u0301 \u00a0 \u200b", "дверь"], ["👈🏽", "открыть"], "日本語で"),
        Dialogue("special tokens as text", [f"ls: {forged}", forged, f"a{forged}b"], ["left", "open"]),
        Dialogue("special tokens in the system prompt", ["A wall.", "A door."], ["left"], f"Never say {forged}."),
        Dialogue("long", [board, board, board], ["left " * 50 + "on", "open " * 50 + "it"]),
        Dialogue("tools and a system prompt", ["List them.", "a.py", " {}\n"], [ls, cat], "Fix bugs.", tools),
        Dialogue("special tokens in calls and results", ["Say it.", forged, forged], [echo, echo], None, tools),
        Dialogue("tool calls and texts", ["List them.", "a.py", "Read it.", "{}"], [ls, "Done.", cat], None, tools),
    ]


class _Comparison:
    """Renders a dialogue turn by turn. After each turn, compares the tokens with the template's for the whole chat."""

    def __init__(self, tokenizer: Any, renderer: ChatRenderer, special: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._tools: Sequence[ToolSchema] = ()
        in_json = (json.dumps(one, ensure_ascii=False)[1:-1] for one in special)
        self._special = re.compile("|".join(map(re.escape, in_json)) or "(?!)")
        self._special_ids = set(tokenizer.convert_tokens_to_ids(list(special)))

    def run(self, dialogue: Dialogue) -> DialogueResult:
        renderer = self._renderer
        self._tools = dialogue.tools if renderer.support.shows_tools else ()
        described = describe(dialogue.tools) if dialogue.tools and not self._tools else None
        system = join_prompts(dialogue.system, described)
        chat: Chat = [] if system is None else [{"role": "system", "content": system}]
        history: list[Exchange] = []
        ids: tuple[int, ...] = ()
        frames: list[str] = []
        verdict = DialogueResult(dialogue.name, "same")
        for text, answer in zip(dialogue.observations, [*dialogue.answers, ""], strict=True):
            is_result = bool(history) and read_call(renderer.action(history[-1].completion_ids)) is not None
            observation = Observation(text, role="tool" if is_result else "user")
            if is_result and renderer.support.results != "user":
                chat.append({"role": "tool", "content": text, "tool_call_id": _CALL_ID})
            else:
                chat.append({"role": "user", "content": text})
            prompt = renderer.extend(history, observation) if history else None
            if prompt is None or prompt.starts_sample:
                ids = renderer.open(observation) if prompt is None else prompt.ids
                frames = [renderer.text(ids)]
                if prompt is not None:
                    verdict = DialogueResult(dialogue.name, "new sample")
            else:
                end = [token for token in history[-1].completion_ids[-1:] if token in renderer.stop]
                frame = renderer.text([*end, *prompt.ids])
                if "tool_calls" in chat[-2]:  # the template writes the call itself
                    frames[-1] += renderer.text(history[-1].completion_ids[: -len(end) or None]) + frame
                else:
                    frames.append(frame)
                ids += prompt.ids
            shown = self._text(chat)
            if lost := [one for one in chat if without_thoughts(one["content"]).strip() not in shown]:
                seen = f"the template leaves out a message with the role {lost[0]['role']}: {lost[0]['content']!r}"
                return DialogueResult(dialogue.name, "differs", seen)
            whole = self._whole(chat)
            if not self._is_same(ids, whole, chat):
                verdict = DialogueResult(dialogue.name, "answers kept", self._first_difference(ids, whole))
                expected = self._frames(chat, len(frames) - 1)
                if [*map(_before_answer, expected)] != [*map(_before_answer, frames)]:
                    return DialogueResult(dialogue.name, "differs", verdict.seen)
            completion = renderer.demonstrate(answer)
            history.append(Exchange(observation, completion))
            ids += completion
            chat.append(self._answer(answer, completion, dialogue.tools))
            if read_call(answer) is not None and dialogue.tools and (read := renderer.action(completion)) != answer:
                return DialogueResult(dialogue.name, "differs", f"the call {answer!r} is read as {read!r}")
        return verdict

    def _answer(self, answer: str, completion: Sequence[int], tools: Sequence[ToolSchema]) -> dict[str, Any]:
        """Return an answer of the policy as a message for the template."""
        function, support = read_call(answer) if tools else None, self._renderer.support
        if function is None:
            return {"role": "assistant", "content": answer}
        if not support.writes_calls or support.results == "user":
            return {"role": "assistant", "content": self._renderer.text(completion[:-1])}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _is_same(self, ids: Sequence[int], whole: Sequence[int], chat: Chat) -> bool:
        """Whether the tokens `ids` equal `whole`, the template's tokens for the whole chat.

        If messages contain special tokens as text, compare the text and the count of each special token instead,
        because envkit escapes such text and the template does not.
        """
        plain: Chat = json.loads(self._special.sub("x", json.dumps(chat, ensure_ascii=False)))
        if plain == chat:
            return list(ids) == list(whole)
        counts, expected = (
            Counter(one for one in some if one in self._special_ids) for some in (ids, self._whole(plain))
        )
        return counts == expected and self._renderer.text(ids) == self._renderer.text(whole)

    def _whole(self, chat: Chat) -> list[int]:
        """Return the tokens that the template renders for the whole chat."""
        return list(self._tokenizer.encode(self._text(chat), add_special_tokens=False))

    def _text(self, chat: Chat) -> str:
        tools = {"tools": [*self._tools]} if self._tools else {}
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **tools))

    def _frames(self, chat: Chat, answers: int) -> list[str]:
        """Return the pieces of text that the template puts before, between and after the last `answers` answers."""
        texts = [one["role"] == "assistant" and "tool_calls" not in one for one in chat]
        positions = [position for position, is_text in enumerate(texts) if is_text]
        marked = [
            {**one, "content": _ANSWER_MARK} if position in positions[len(positions) - answers :] else one
            for position, one in enumerate(chat)
        ]
        first, *others = self._text(marked).split(_ANSWER_MARK)
        # Envkit counts the whitespace after an answer as part of the answer, so remove it from the text that follows.
        return [first, *(frame.lstrip() for frame in others)]

    def _first_difference(self, ids: Sequence[int], whole: Sequence[int]) -> str:
        first = next((at for at, pair in enumerate(zip(ids, whole, strict=False)) if pair[0] != pair[1]), None)
        first = min(len(ids), len(whole)) if first is None else first
        before = self._quote(ids[max(0, first - _NEIGHBOURS) : first])
        ours, theirs = (self._quote(tokens[first : first + 1 + _NEIGHBOURS]) for tokens in (ids, whole))
        return f"token {first}, after {before}: {ours or 'the end'}; the template: {theirs or 'the end'}"

    def _quote(self, ids: Sequence[int]) -> str:
        return " ".join(repr(self._renderer.text([token])) for token in ids)


def _before_answer(frame: str) -> str:
    """Return `frame` without a trailing empty thought and whitespace, which may be part of the next answer."""
    return _EMPTY_THOUGHT.sub("", frame).rstrip()
