"""The plot of a run: its learning curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from envkit.types import JSON

Rows: TypeAlias = Sequence[Mapping[str, JSON]]

LEARNING_CURVE = "learning_curve.png"

_DPI = 160
_INK = "#24292f"
_FAINT = "#afb8c1"
_BLUE = "#0969da"
_ORANGE = "#bc4c00"
_MAX_MARKERS = 30


class Curve(NamedTuple):
    """The finite values of a metric by train step, in order."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


def draw(folder: Path, metrics: Rows, evaluations: Rows) -> None:
    """Write the plot of a run into the existing `folder`, unless it would have no curves.

    Args:
        folder: The folder.
        metrics: The rows of ``metrics.jsonl``.
        evaluations: The rows of ``evaluations.jsonl``.

    Raises:
        OSError: The file cannot be written.
    """
    if (figure := learning_curve(metrics, evaluations)) is None:
        return
    part = folder / f".{LEARNING_CURVE}.part"
    try:
        # Unlike savefig, this does not draw everything once before, only to find the layout.
        FigureCanvasAgg(figure).print_png(part)  # type: ignore[no-untyped-call]
        part.replace(folder / LEARNING_CURVE)  # so that viewers never read a partial file
    finally:
        part.unlink(missing_ok=True)


def curve_of(rows: Rows, key: str) -> Curve:
    """Return the values of `key` by train step. If several rows have the same step, the last row counts."""
    found: dict[int, float] = {}
    for row in rows:
        step, value = row.get("step"), row.get(key)
        if isinstance(step, int) and isinstance(value, (int, float)) and math.isfinite(value):
            found[step] = float(value)
    steps = sorted(found)
    return Curve(tuple(steps), tuple(found[step] for step in steps))


def learning_curve(metrics: Rows, evaluations: Rows) -> Figure | None:
    """Plot the success rate on held-out levels and in training; return None if there are no data."""
    training = curve_of(metrics, "success")
    held_out = {
        name: curve
        for name, key in (("sampled", "eval_success"), ("greedy", "eval_greedy"))
        if (curve := curve_of(evaluations, key)).steps
    }
    if not held_out and not training.steps:
        return None
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(8, 4.6), dpi=_DPI, layout=layout, facecolor="white")
    axes = figure.subplots()
    title = "Success on held-out levels" if held_out else "Success in training"
    axes.set_title(title, loc="left", fontsize=13, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors="#57606a", labelsize=9)
    axes.grid(color="#eaeef2", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("train step", color=_INK)
    axes.set_ylabel("episodes that succeed", color=_INK)
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if training.steps:
        # Draw a constant curve or a single point with a wider line, because other curves may cover a thin line.
        width = 1.2 if len(set(training.values)) > 1 else 6
        marker = "o" if len(training.steps) == 1 else ""
        axes.plot(*training, color=_FAINT, linewidth=width, marker=marker, markersize=12, zorder=1, clip_on=False,
                  label="in training,\nsampled")  # fmt: skip
    # If both held-out curves coincide, the greedy curve shows as dashes, and as rings around the dots of the other.
    styles = {"sampled": (_BLUE, "-", 5, _BLUE), "greedy": (_ORANGE, (0, (3, 2)), 8, "none")}
    for name, curve in held_out.items():
        color, dashes, size, face = styles[name]
        every = max(1, len(curve.steps) // _MAX_MARKERS)
        change = f"{curve.values[0]:.1%} → {curve.values[-1]:.1%}" if len(curve.steps) > 1 else f"{curve.values[0]:.1%}"
        axes.plot(*curve, color=color, linewidth=2, linestyle=dashes, zorder=2, clip_on=False,
                  marker="o", markersize=size, markerfacecolor=face, markevery=every,
                  label=f"{name}\n{change}")  # fmt: skip
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=_INK, fontsize=11)
    return figure
