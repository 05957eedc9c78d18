"""Durations of the parts of episodes, and their quantiles for the metrics of a train step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envkit.types import Trajectory

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def durations(attempts: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Return the durations (s) of the parts of episodes, by the name of the part.

    Per episode: ``queue`` (until it has an environment), ``reset``, and ``episode`` (the sum of all its parts). Per
    turn: ``wait`` (at the gate), ``generate`` (the completion) and ``step`` (of the environment).
    """
    turns = [turn for one in attempts for turn in one.turns]
    return {
        "queue": [one.queue_s for one in attempts],
        "reset": [one.reset_s for one in attempts],
        "wait": [turn.wait_s for turn in turns],
        "generate": [turn.generate_s for turn in turns],
        "step": [turn.step_s for turn in turns],
        "episode": [
            one.queue_s + one.reset_s + sum(turn.wait_s + turn.generate_s + turn.step_s for turn in one.turns)
            for one in attempts
        ],
    }


def quantile_metrics(durations: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the quantiles of durations as metrics, such as ``step_p90_s``; no metrics for a part without durations."""
    metrics: dict[str, float] = {}
    for part, values in durations.items():
        if values:
            found = np.quantile(values, list(QUANTILES.values()))
            metrics |= {f"{part}_{name}_s": float(value) for name, value in zip(QUANTILES, found, strict=True)}
    return metrics
