"""Plot of the success rate by difficulty of the levels."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..run_folder.plots import BLUE, FAINT, INK, frame, new_figure, save
from .result import MAX_STRATA, Evaluation
from .statistics import Stratum

_MAX_LABELLED_BARS = 16
_TITLE_WIDTH = 75
"""Maximum number of characters in a line of the title."""
_NOTE = "#6e7781"


def draw(found: Evaluation, path: Path) -> None:
    """Plot the success rate by length of the shortest solution, with 95 % intervals, and below it the episode counts.

    The `levels` of the evaluation are not empty. The file has the format PNG.
    """
    figure = new_figure(8, 5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1.1])
    title = f"{found.policy} on {found.env_id}: success by difficulty"
    frame(above, textwrap.fill(title, _TITLE_WIDTH).replace("$", r"\$"), size=13)
    strata = found.by_difficulty(most=MAX_STRATA)
    _success(above, strata)
    overall = found.metrics["success"].mean
    above.axhline(overall, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    transform = above.get_yaxis_transform()
    above.text(1.02, overall, f"all\n{overall:.1%}", color=_NOTE, va="center", fontsize=10, transform=transform)
    frame(below, "", size=10)
    _counts(below, found.by_difficulty())
    figure.align_ylabels()
    tasks = "1 task" if len(found.levels) == 1 else f"{len(found.levels):,} tasks"
    attempts = f", {found.attempts} attempts at each" if found.attempts > 1 else ""
    notes = [f"{tasks}{attempts}", "vertical bars: 95 % intervals"]
    if any(one.shortest < one.longest for one in strata):
        notes.append("horizontal bars: ranges of lengths")
    figure.supxlabel(" · ".join(notes), fontsize=9, color=_NOTE)
    save(figure, path)


def _success(axes: Axes, strata: list[Stratum]) -> None:
    x = [one.mean for one in strata]
    y = [one.success.mean for one in strata]
    down = [one.success.mean - one.success.low for one in strata]
    up = [one.success.high - one.success.mean for one in strata]
    axes.plot(x, y, color=BLUE, linewidth=1.2, alpha=0.35, zorder=2)
    axes.hlines(y, [one.shortest for one in strata], [one.longest for one in strata], color=BLUE, alpha=0.35, zorder=2)
    axes.errorbar(x, y, [down, up], fmt="o", color=BLUE, markersize=5, linewidth=1.6, capsize=3, zorder=3)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("episodes that succeed", color=INK)


def _counts(axes: Axes, strata: list[Stratum]) -> None:
    bars = axes.bar([one.shortest for one in strata], [one.episodes for one in strata], width=0.8, color=FAINT)
    if len(strata) <= _MAX_LABELLED_BARS:
        axes.bar_label(bars, fontsize=8, color="#57606a", padding=1)
        axes.margins(y=0.3)
    axes.set_xlim(strata[0].shortest - 0.7, strata[-1].longest + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True, min_n_ticks=1))
    axes.set_xlabel("moves of the shortest solution", color=INK)
    axes.set_ylabel("episodes", color=INK)
