"""History wrapper: each observation contains the episode so far, for policies that see only one observation."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from envkit.errors import UsageError
from envkit.spaces import Utf8Text
from envkit.wrappers.wrapping import TextEnv, TextStep, TextWrapper, longest_text

PARSED_ACTION = "parsed_action"
"""Key in ``info`` for the part of a reply that was used, if only a part was used. The library GEM uses this key too."""

_LONGEST = 1 << 20


class EpisodeHistory(NamedTuple):
    """The turns of a running episode.

    Attributes:
        first: The first observation, which contains the rules.
        omitted: Number of turns that are omitted between `first` and `turns`.
        turns: For each remaining turn, oldest first: the reply, and the observation that followed it.
    """

    first: str
    omitted: int
    turns: Sequence[tuple[str, str]]


Style = Callable[[EpisodeHistory], str]
Message = dict[str, str]


def observations(past: EpisodeHistory) -> str:
    """History style that shows all observations, separated by empty lines."""
    return "\n\n".join([_opening(past), *(observation for _, observation in past.turns)])


def transcript(past: EpisodeHistory) -> str:
    """History style that shows all observations and replies, separated by empty lines."""
    return "\n\n".join([_opening(past), *(text for turn in past.turns for text in turn)])


class chat:  # noqa: N801 - lower case, because the other styles are functions
    """History style that renders a chat. Observations are the user's messages, and replies are the assistant's.

    Args:
        render: Converts a list of ``{"role": ..., "content": ...}`` to the prompt. For transformers' tokenizers:
            ``functools.partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)``.
    """

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render

    def __call__(self, past: EpisodeHistory) -> str:
        messages = [{"role": "user", "content": _opening(past)}]
        for reply, observation in past.turns:
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": observation})
        return self._render(messages)


class History(TextWrapper):
    """Replaces each observation by the episode so far, as `style` formats it.

    The new observation contains the first observation, which has the rules, and the last `limit` turns. If the text
    would exceed the maximum length of an observation, it contains fewer turns. A line states how many turns are
    omitted. A reply that is longer than a quarter of the maximum length is cut. If the environment reports the part of
    the reply that it used as ``info["parsed_action"]``, the history contains only this part.

    Args:
        env: A text environment.
        style: `observations`, `transcript`, a `chat`, or any function that converts an `EpisodeHistory` to text.
        limit: Maximum number of turns to show, at least 1; None for all.

    Raises:
        UsageError: `limit` is below 1, or `style` is not a function. `reset` and `step` raise this error if the style
            returns no text, or a text that is too long even with only one turn.
    """

    def __init__(self, env: TextEnv, style: Style = observations, *, limit: int | None = None) -> None:
        super().__init__(env, style=style, limit=limit)
        given: object = style
        if isinstance(given, type) or not callable(given):
            hint = "chat(render)" if given is chat else "transcript"
            raise UsageError(f"style: must be a function of an EpisodeHistory, such as {hint}, got {style!r}")
        if limit is not None and limit < 1:
            raise UsageError(f"limit: must be at least 1, got {limit}")
        self._style = style
        self._first = ""
        self._count = 0
        self._turns: deque[tuple[str, str]] = deque(maxlen=limit)
        self._longest = max(_LONGEST, 4 * longest_text(env))
        self.observation_space = Utf8Text(self._longest)

    def _began(self, observation: str, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._first, self._count = observation, 0
        self._turns.clear()
        return self._write(), info

    def _played(self, action: str) -> TextStep:
        observation, reward, terminated, truncated, info = super()._played(action)
        self._turns.append((self._shortened(str(info.get(PARSED_ACTION, action))), observation))
        self._count += 1
        return self._write(), reward, terminated, truncated, info

    def _shortened(self, reply: str) -> str:
        """Return the reply, cut to a length that always fits into the new observation."""
        most = self._longest // 4
        return reply if len(reply) <= most else f"{reply[:most]} [{len(reply) - most:,} more characters are cut]"

    def _write(self) -> str:
        while True:
            text: object = self._style(EpisodeHistory(self._first, self._count - len(self._turns), tuple(self._turns)))
            if not isinstance(text, str):
                raise UsageError(f"style: must return text, got {reprlib.repr(text)}")
            if len(text) <= self._longest:
                return text
            if len(self._turns) <= 1:
                raise UsageError(f"style: returned {len(text):,} characters for one turn (limit {self._longest:,})")
            self._turns.popleft()


def _opening(past: EpisodeHistory) -> str:
    if not past.omitted:
        return past.first
    turns = "1 earlier turn is" if past.omitted == 1 else f"{past.omitted} earlier turns are"
    return f"{past.first}\n\n[{turns} not shown]"
