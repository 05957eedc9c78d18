"""Plots of a run: the learning curve, and the metrics that show whether training is healthy.

`draw` takes the rows of ``metrics.jsonl`` and ``evaluations.jsonl``. A run without evaluations, or one that was stopped
early, has fewer curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

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
INK = "#24292f"
FAINT = "#afb8c1"
_GRID = "#eaeef2"
BLUE = "#0969da"
_ORANGE = "#bc4c00"
_MAX_MARKERS = 30
_MAX_WINDOW = 25
_NOISE = 1e-6
"""Values up to this absolute value count as rounding errors, and the axis is not scaled to them."""
_NOTE = "#6e7781"


class Curve(NamedTuple):
    """The finite values of a metric by train step, in order."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


class _Panel(NamedTuple):
    """A small plot of the metric `key`. `from_zero` is whether the y axis always includes 0."""

    key: str
    title: str
    from_zero: bool = True


_PANELS = (
    _Panel("return", "return per episode", from_zero=False),
    _Panel("entropy_nats", "entropy (nats per token)"),
    _Panel("approx_kl", "KL to sampling policy (nats)"),
    _Panel("clip_share", "share of tokens clipped"),
    _Panel("grad_norm", "gradient norm, unclipped"),
    _Panel("tokens_per_s", "speed (tokens/s)"),
    _Panel("episode_turns", "turns per episode"),
    _Panel("policy_loss", "policy loss", from_zero=False),
    _Panel("value_loss", "value loss"),
    _Panel("lost_episodes", "lost episodes"),
)


def draw(folder: Path, metrics: Rows, evaluations: Rows) -> None:
    """Write the plots of a run into the existing `folder`, without plots that would have no curves.

    Raises:
        OSError: The files cannot be written.
    """
    figures = {LEARNING_CURVE: learning_curve(metrics, evaluations), TRAINING: training_panels(metrics)}
    for name, figure in figures.items():
        if figure is not None:
            save(figure, folder / name)


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
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    frame(axes, "Success on held-out levels" if held_out else "Success in training", size=13)
    axes.set_xlabel("train step", color=INK)
    axes.set_ylabel("episodes that succeed", color=INK)
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if training.steps:
        # Draw a constant curve or a single point with a wider line, because other curves may cover a thin line.
        width = 1.2 if len(set(training.values)) > 1 else 6
        marker = "o" if len(training.steps) == 1 else ""
        axes.plot(*training, color=FAINT, linewidth=width, marker=marker, markersize=12, zorder=1, clip_on=False,
                  label="in training,\nsampled")  # fmt: skip
    # If both held-out curves coincide, the greedy curve shows as dashes, and as rings around the dots of the other.
    styles = {"sampled": (BLUE, "-", 5, BLUE), "greedy": (_ORANGE, (0, (3, 2)), 8, "none")}
    for name, curve in held_out.items():
        color, dashes, size, face = styles[name]
        every = max(1, len(curve.steps) // _MAX_MARKERS)
        change = f"{curve.values[0]:.1%} → {curve.values[-1]:.1%}" if len(curve.steps) > 1 else f"{curve.values[0]:.1%}"
        axes.plot(*curve, color=color, linewidth=2, linestyle=dashes, zorder=2, clip_on=False,
                  marker="o", markersize=size, markerfacecolor=face, markevery=every,
                  label=f"{name}\n{change}")  # fmt: skip
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=INK, fontsize=11)
    return figure


def training_panels(metrics: Rows) -> Figure | None:
    """Plot each metric of `_PANELS` that has values, in a panel of its own; return None if none has values."""
    panels = [(panel, curve) for panel in _PANELS if (curve := curve_of(metrics, panel.key)).steps]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(max(4, 3 * columns), 2.2 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    subplots = [axes for row in grid for axes in row]
    steps = max(len(curve.steps) for _, curve in panels)
    window = 1 if steps < 40 else min(_MAX_WINDOW, steps // 20) | 1  # odd; 1 does not smooth
    for number, (axes, (panel, curve)) in enumerate(zip(subplots, panels, strict=False)):
        frame(axes, panel.title, size=11)
        if window == 1:
            axes.plot(*curve, color=BLUE, linewidth=1.6, marker="o", markersize=4, clip_on=False, zorder=3)
        else:
            axes.plot(*curve, color=BLUE, linewidth=0.8, alpha=0.3)
            axes.plot(curve.steps, means(curve.values, window), color=BLUE, linewidth=1.8)
        _scale(axes, panel, curve)
        axes.tick_params(labelbottom=number + columns >= len(panels))
    for axes in subplots[len(panels) :]:
        axes.set_visible(False)
    note = "" if window == 1 else f" (faint: each; strong: mean of {window})"
    figure.supxlabel(f"train step{note}", fontsize=10, color=INK)
    return figure


def _scale(axes: Axes, panel: _Panel, curve: Curve) -> None:
    """Scale the y axis, and add a note if all values are zero or rounding errors."""
    low, high = min(0.0, *curve.values), max(0.0, *curve.values)
    if max(-low, high) <= _NOISE:
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
        note = "0 throughout" if low == high else f"below {_NOISE:g} throughout"
        axes.text(0.5, 0.6, note, color=_NOTE, ha="center", fontsize=10, transform=axes.transAxes)
        return
    if panel.from_zero:
        axes.set_ylim(bottom=low * 1.08, top=high * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(4))


def means(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving average over `window` values, or over fewer values near both ends."""
    half = window // 2
    near = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return [math.fsum(some) / len(some) for some in near]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` by `height` inches. The figure needs no display and no global state."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    return Figure(figsize=(width, height), dpi=_DPI, layout=layout, facecolor="white")


def frame(axes: Axes, title: str, *, size: int) -> None:
    """Set the title of a plot, in a font of `size` points, and apply the style that all plots share."""
    axes.set_title(title, loc="left", fontsize=size, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors="#57606a", labelsize=9)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def save(figure: Figure, path: Path) -> None:
    """Write `figure` atomically, so that viewers never read a partial file."""
    part = path.with_name(f".{path.name}.part")
    try:
        # Unlike savefig, this does not draw everything once before, only to find the layout.
        FigureCanvasAgg(figure).print_png(part)  # type: ignore[no-untyped-call]
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
