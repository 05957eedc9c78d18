"""The plots of a run: its learning curve, and the metrics that show whether training is healthy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from envkit.types import JSON

Rows: TypeAlias = Sequence[Mapping[str, JSON]]

LEARNING_CURVE = "learning_curve.png"
TRAINING = "training.png"

_DPI = 160
_INK = "#24292f"
_FAINT = "#afb8c1"
_BLUE = "#0969da"
_ORANGE = "#bc4c00"
_MAX_MARKERS = 30
_MAX_WINDOW = 25
_NOISE = 1e-6
"""Values up to this absolute value count as rounding errors, and the axis is not scaled to them."""


class Curve(NamedTuple):
    """The finite values of a metric by train step, in order."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


_PANELS = {
    "return": "return per episode",
    "entropy_nats": "entropy (nats per token)",
    "approx_kl": "KL to sampling policy (nats)",
    "clip_share": "share of tokens clipped",
    "grad_norm": "gradient norm, unclipped",
    "tokens_per_s": "speed (tokens/s)",
    "episode_turns": "turns per episode",
    "policy_loss": "policy loss",
    "value_loss": "value loss",
    "lost_episodes": "lost episodes",
}
_WITHOUT_ZERO = ("return", "policy_loss")
"""Metrics whose y axis need not include 0."""


def draw(folder: Path, metrics: Rows, evaluations: Rows) -> None:
    """Write the plots of a run into the existing `folder`, unless they would have no curves.

    Args:
        folder: The folder.
        metrics: The rows of ``metrics.jsonl``.
        evaluations: The rows of ``evaluations.jsonl``.

    Raises:
        OSError: The files cannot be written.
    """
    for name, figure in ((LEARNING_CURVE, learning_curve(metrics, evaluations)), (TRAINING, training_panels(metrics))):
        if figure is None:
            continue
        part = folder / f".{name}.part"
        try:
            # Unlike savefig, this does not draw everything once before, only to find the layout.
            FigureCanvasAgg(figure).print_png(part)  # type: ignore[no-untyped-call]
            part.replace(folder / name)  # so that viewers never read a partial file
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
    figure = _figure(8, 4.6)
    axes = figure.subplots()
    _frame(axes, "Success on held-out levels" if held_out else "Success in training", size=13)
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


def training_panels(metrics: Rows) -> Figure | None:
    """Plot each metric of `_PANELS` that has values, in a panel of its own; return None if none has values."""
    curves = {key: curve for key in _PANELS if (curve := curve_of(metrics, key)).steps}
    if not curves:
        return None
    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = _figure(max(4, 3 * columns), 2.2 * rows + 0.4)
    subplots = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    steps = max(len(curve.steps) for curve in curves.values())
    window = 1 if steps < 40 else min(_MAX_WINDOW, steps // 20) | 1  # odd; 1 does not smooth
    for number, (axes, (key, curve)) in enumerate(zip(subplots, curves.items(), strict=False)):
        _frame(axes, _PANELS[key], size=11)
        if window == 1:
            axes.plot(*curve, color=_BLUE, linewidth=1.6, marker="o", markersize=4, clip_on=False, zorder=3)
        else:
            axes.plot(*curve, color=_BLUE, linewidth=0.8, alpha=0.3)
            axes.plot(curve.steps, _means(curve.values, window), color=_BLUE, linewidth=1.8)
        _scale(axes, curve.values, from_zero=key not in _WITHOUT_ZERO)
        axes.tick_params(labelbottom=number + columns >= len(curves))
    for axes in subplots[len(curves) :]:
        axes.set_visible(False)
    note = "" if window == 1 else f" (faint: each; strong: mean of {window})"
    figure.supxlabel(f"train step{note}", fontsize=10, color=_INK)
    return figure


def _scale(axes: Axes, values: Sequence[float], *, from_zero: bool) -> None:
    """Scale the y axis, and add a note if all values are zero or rounding errors."""
    low, high = min(0.0, *values), max(0.0, *values)
    if max(-low, high) <= _NOISE:
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
        note = "0 throughout" if low == high else f"below {_NOISE:g} throughout"
        axes.text(0.5, 0.6, note, color=_INK, ha="center", fontsize=10, transform=axes.transAxes)
        return
    if from_zero:
        axes.set_ylim(bottom=low * 1.08, top=high * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _means(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving average over `window` values, or over fewer values near both ends."""
    half = window // 2
    return [float(np.mean(values[max(0, index - half) : index + half + 1])) for index in range(len(values))]


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` by `height` inches."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    return Figure(figsize=(width, height), dpi=_DPI, layout=layout, facecolor="white")


def _frame(axes: Axes, title: str, *, size: int) -> None:
    """Set the title of a plot, in a font of `size` points, and the style that all plots share."""
    axes.set_title(title, loc="left", fontsize=size, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors="#57606a", labelsize=9)
    axes.grid(color="#eaeef2", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
