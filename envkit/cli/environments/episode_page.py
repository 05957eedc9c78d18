"""Prints recorded episodes: a heading per episode, then its turns. Turns with narrow text are printed side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import TextIO

import orjson
from rich.console import Console
from rich.text import Text

from envkit.runs.printable import counted, printable
from envkit.trainer_bridge.evaluation.outcomes import shortest_of
from envkit.types import EpisodeRecord, FinishReason, TurnRecord

_NARROW = 36
"""Maximum width in columns of a turn that is printed beside other turns."""
_GRADER_LINES = 20
_GAP = "   "
_INDENT = "  "
_ANSWER = re.compile("<answer>([^<>]*)</answer>")
_STYLES = {"succeeded": "bold green", "failed": "bold red", "ended": "bold", "lost": "bold yellow"}


_Block = Sequence[Text]
"""The lines to print for one turn, or for the start of an episode."""


class EpisodePage:
    """Writes episodes to `stream`, with colours and wrapped lines if it is a terminal.

    With `prompts`, each turn has the model's prompt and completion instead of action and observation.
    """

    def __init__(self, stream: TextIO, *, prompts: bool) -> None:
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._prompts = prompts

    def heading(self, title: str, episodes: Sequence[EpisodeRecord]) -> None:
        """Write the title, and below it each environment of `episodes` with its options."""
        self._write(_line(title, "bold"))
        for env in sorted({_env(one) for one in episodes}):
            self._write(_line(env, "dim"))

    def note(self, text: str) -> None:
        """Write a line below the episodes, such as how many of them are shown."""
        self._console.print()
        self._write(_line(text, "dim"))

    def episode(self, episode: EpisodeRecord, number: int) -> None:
        """Write one episode; `number` is the number of its line in the file, counted from 1."""
        verdict = _verdict(episode)
        task = f"  {episode.label}, attempt {episode.member + 1}  "
        self._console.print()
        self._write(Text.assemble((f"episode {number}", "bold"), task, (verdict, _STYLES[verdict])))
        self._write(_line(", ".join(_facts(episode)), "dim"))
        if episode.outcome.error is not None:
            self._write(_line(episode.outcome.error, "red"))
        for is_narrow, some in groupby(self._blocks(episode), key=lambda block: _width(block) <= _NARROW):
            self._rows(list(some), side_by_side=is_narrow)
        if episode.outcome.success is False and (output := episode.outcome.grader_output):
            lines = _text(output)[-_GRADER_LINES:]
            self._rows([[Text("the grader printed", style="bold"), *lines]], side_by_side=False)

    def _blocks(self, episode: EpisodeRecord) -> Iterator[_Block]:
        if episode.start is not None and not self._prompts:
            yield [Text("start", style="bold"), *_text(episode.start.text)]
        for number, turn in enumerate(episode.turns, 1):
            yield self._turn(turn, number, is_last=number == len(episode.turns))

    def _turn(self, turn: TurnRecord, number: int, *, is_last: bool) -> _Block:
        title = Text(f"{number}.", style="bold")
        notes = [Text(note, style="yellow") for note in _notes(turn)]
        action = _text(_action(turn), "cyan")
        observation = _text("" if turn.observation is None else turn.observation.text)
        if self._prompts and turn.generation is not None:
            sections = {
                "prompt": _text(turn.generation.prompt),
                "completion": _text(turn.generation.completion, "cyan"),
                "observation": observation if is_last else [],
            }
        elif len(action) > 1:
            sections = {"action": action, "observation": observation}
        else:
            return [Text.assemble(title, " ", *action), *observation, *notes]
        body = [
            line
            for name, lines in sections.items()
            if lines
            for line in (Text(name, style="dim"), *(Text.assemble(_INDENT, one) for one in lines))
        ]
        return [title, *body, *notes]

    def _rows(self, blocks: Sequence[_Block], *, side_by_side: bool) -> None:
        width = max(map(_width, blocks))
        fitting = (self._console.width - len(_INDENT) + len(_GAP)) // (width + len(_GAP))
        per_row = max(1, fitting) if side_by_side else 1
        for first in range(0, len(blocks), per_row):
            self._console.print()
            for cells in zip_longest(*blocks[first : first + per_row], fillvalue=Text()):
                line = Text(_INDENT)
                for cell in cells:
                    line.append_text(cell).append(" " * (width - cell.cell_len) + _GAP)
                line.rstrip()
                self._write(line)

    def _write(self, line: Text) -> None:
        self._console.print(line, soft_wrap=not self._console.is_terminal)


def _width(block: _Block) -> int:
    return max(line.cell_len for line in block)


def summary(episodes: Sequence[EpisodeRecord]) -> str:
    """Return the outcome counts of one or more episodes: ``"train step 5, 2 episodes of 1 task: 2 succeeded"``."""
    step = "" if episodes[0].train_step is None else f"train step {episodes[0].train_step}, "
    verdicts = [_verdict(one) for one in episodes]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in _STYLES if verdict in verdicts)
    tasks = len({one.index for one in episodes})
    return f"{step}{counted(len(episodes), 'episode')} of {counted(tasks, 'task')}: {counts}"


def _verdict(episode: EpisodeRecord) -> str:
    outcome = episode.outcome
    if outcome.is_void:
        return "lost"
    return {True: "succeeded", False: "failed", None: "ended"}[outcome.success]


def _env(episode: EpisodeRecord) -> str:
    options = (f"{name}={orjson.dumps(value).decode()}" for name, value in episode.options.items())
    return " ".join([episode.env_id, *options])


def _facts(episode: EpisodeRecord) -> Iterator[str]:
    if not episode.outcome.is_void:
        yield f"reward {_number(episode.outcome.reward)}"
    yield counted(len(episode.turns), "turn")
    yield f"ended: {episode.outcome.stop.value}"
    if (shortest := shortest_of(episode.start_info)) is not None:
        yield f"shortest solution: {counted(shortest, 'move')}"
    yield from (f"{name} {_number(value)}" for name, value in episode.outcome.metrics.items())


def _action(turn: TurnRecord) -> str:
    """Return the action to show: a valid answer without its tags, any other action unchanged."""
    answer = _ANSWER.fullmatch(turn.action)
    return turn.action if answer is None or turn.info.get("action_is_valid") is not True else answer[1]


def _notes(turn: TurnRecord) -> Iterator[str]:
    """Yield a note on each thing to notice in a turn, such as a reward other than 0 or an invalid action."""
    if turn.observation is None:
        yield "no answer"
    elif turn.reward != 0:
        yield f"reward {_number(turn.reward)}"
    if turn.info.get("action_is_valid") is False:
        yield "not a valid action"
    elif turn.info.get("action_is_effective") is False:
        yield "no effect"
    generation = turn.generation
    if generation is not None and generation.is_cut:
        yield "cut at the token limit"
    elif generation is not None and generation.finish is FinishReason.ABORTED:
        yield "aborted"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _text(text: str, style: str = "") -> list[Text]:
    return [Text(line, style=style) for line in printable(text).expandtabs(4).removesuffix("\n").split("\n")]


def _line(text: str, style: str) -> Text:
    return Text(" ".join(printable(text).split("\n")), style=style)
