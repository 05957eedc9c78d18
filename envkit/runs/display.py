"""Progress displays for long runs: a live bar on a terminal, or a plain line from time to time elsewhere."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from envkit import clock

from .printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

LINE_EVERY_S = 10.0
"""Seconds between two progress lines if the output is not a terminal."""

_STICKY = "\N{NO-BREAK SPACE}"


class Display(Protocol):
    """Shows the progress of a run to people; by default nothing. Programs read the files of the run instead."""

    def announce(self, line: str) -> None:
        """Show a permanent line."""
        return

    def phase(self, name: str, total: int) -> None:
        """Start a part of the run that has `total` units of progress, and end the previous part.

        The new part continues an earlier part with the same name and total if its first call of `advance` adds as many
        units as the earlier part had reached. Its elapsed time then counts from the start of the earlier part.
        """
        return

    def advance(self, count: int = 1, **shown: float | str) -> None:
        """Add `count` units of progress to the current part; `shown`, if not empty, replaces the numbers on display."""
        return

    def close(self) -> None:
        """End the current part; repeated calls have no effect."""
        return


class SilentDisplay(Display):
    """A display that shows nothing."""


class StreamDisplay(Display):
    """Shows a live bar if the stream is a terminal, and otherwise lines at intervals of at least `every_s` seconds.

    Each finished part of the run leaves one line. On a terminal, the numbers of `advance` are on separate lines, so
    that the bar keeps its width.
    """

    def __init__(
        self, stream: TextIO, *, every_s: float = LINE_EVERY_S, now: Callable[[], float] = clock.stopwatch
    ) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._is_live = stream.isatty()
        self._live: Live | None = None
        self._every_s = every_s
        self._now = now
        self._part: _Part | None = None
        self._ended: dict[str, _Part] = {}
        self._written = (0, 0.0)  # Progress and time (s) at the last line of output.

    def announce(self, line: str) -> None:
        self._console.print(printable(line), soft_wrap=True)

    def phase(self, name: str, total: int) -> None:
        self.close()
        name, now = printable(name), self._now()
        self._part, self._written = _Part(name, total, now, self._ended.get(name)), (0, now)
        if self._is_live:
            from rich.live import Live

            self._live = Live(get_renderable=self._drawn, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def advance(self, count: int = 1, **shown: float | str) -> None:
        part, now = self._part, self._now()
        if part is not None:
            part.count(count, figures(shown), now)
            if not self._is_live and now - self._written[1] >= self._every_s:
                self._written = (part.done, now)
                self.announce(part.line(now, part.eta(now)))

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        part, self._part = self._part, None
        if part is not None:
            self._ended[part.name] = part
            if part.done > self._written[0]:
                self.announce(part.line(self._now()))

    def _drawn(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        part, now = self._part, self._now()
        if part is None:
            return Text()
        line = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None, None, None):
            line.add_column(ratio=ratio, no_wrap=True)
        line.add_row(
            Text(part.name, style="bold"),
            ProgressBar(total=max(1, part.total), completed=part.done),
            f"{part.done}/{part.total}",
            duration(now - part.began_s),
            Text(part.eta(now), style="dim"),
        )
        if not part.figures:
            return line
        whole = [figure.replace(" ", _STICKY) for figure in part.figures]
        lines = textwrap.wrap("  ".join(whole), max(20, self._console.width - 2))
        return Group(line, *(Text(f"  {text.replace(_STICKY, ' ')}", style="dim", no_wrap=True) for text in lines))


class _Part:
    """A part of the run: its progress, elapsed time and remaining time."""

    def __init__(self, name: str, total: int, began_s: float, earlier: _Part | None) -> None:
        self.name = name
        self.total = total
        self.began_s = began_s
        self.done = 0
        self.figures: Sequence[str] = ()
        self._earlier = earlier
        self._first: tuple[int, float] | None = None
        self._last_s = began_s

    def count(self, count: int, figures: Sequence[str], now: float) -> None:
        self.done += count
        self.figures = figures or self.figures
        self._last_s = now
        if self._first is None:
            self._first = (self.done, now)
            earlier = self._earlier
            if earlier is not None and earlier.total == self.total and earlier.done == self.done < self.total:
                self.began_s, self._first = earlier.began_s, earlier._first

    def eta(self, now: float) -> str:
        """Return the remaining time as text, estimated from the pace since the first advance; empty if unknown.

        The first advance is not counted: a resumed run jumps to the step it had reached, without doing any work.
        """
        if self._first is None or self.done <= self._first[0] or self.done >= self.total:
            return ""
        pace_s = (self._last_s - self._first[1]) / (self.done - self._first[0])
        return f"eta {duration(max(0.0, self._last_s + pace_s * (self.total - self.done) - now))}"

    def line(self, now: float, eta: str = "") -> str:
        until = self._last_s if self.done >= self.total else now
        words = [f"{self.name} {self.done}/{self.total}", duration(until - self.began_s), eta, *self.figures]
        return "  ".join(word for word in words if word)


def figures(shown: Mapping[str, float | str]) -> list[str]:
    """Return names and numbers as texts, such as ``["success 0.412", "tokens/s 5,210"]``."""
    return [printable(f"{name.replace('_', ' ')} {figure(value)}") for name, value in shown.items()]


def figure(value: float | str) -> str:
    """Return a number as text, rounded to a readable number of digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}" if 0 < size < 0.001 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Return a duration as text, such as ``"1:02:03"``, or ``"2:03"`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
