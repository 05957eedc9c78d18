"""Diagnosis of runs that do not learn: problems visible in the metrics of the last train steps, with advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from envkit.types import JSON

STEPS = 5
"""Number of consecutive train steps in which a problem must occur before it is reported."""
CUT_SHARE = 0.5
"""Minimum share of cut-off completions that is reported as a problem."""

Rows = Sequence[Mapping[str, JSON]]


def diagnose(rows: Rows) -> dict[str, str]:
    """Return the problems found in the last train steps: a mapping from each problem's name to a line for the user.

    Args:
        rows: Metrics of the train steps, oldest first. Only the last `STEPS` rows are used, or all rows if there are
            fewer. Without rows, the result is empty.
    """
    last = rows[-STEPS:]
    if not last:
        return {}
    period = "the last train step" if len(last) == 1 else f"the last {len(last)} train steps"
    found: dict[str, str] = {}
    if _all(last, "cut_completions", lambda share: share >= CUT_SHARE):
        found["cut"] = (
            f"{_mean(last, 'cut_completions'):.0%} of the completions of {period} were cut off at rollout.turn_tokens; "
            "raise it (and rollout.max_tokens), or ask for shorter answers"
        )
    if _all(last, "action_is_valid", lambda share: share == 0):
        found["invalid"] = (
            f"no action of {period} was valid: the policy does not use the answer format of the environment; "
            "read trajectories/, then try a warm-up with demonstrations or a model that follows instructions"
        )
    if _all(last, "advantage_abs", lambda size: size == 0):
        found["alike"] = f"nothing to learn in {period}: {_alike(last)}"
    return found


def _alike(rows: Rows) -> str:
    if _all(rows, "success", lambda share: share == 1):
        return "every episode succeeded; use harder levels (env.options)"
    return (
        "all episodes of each group had the same return, so every advantage was 0; try easier levels (env.options), "
        "a larger rollout.group_size, a higher rollout.temperature or a longer warm-up"
    )


def _all(rows: Rows, name: str, test: Callable[[float], bool]) -> bool:
    """Return whether every row has a metric `name` that is a number and passes `test`."""
    return all(isinstance(value := row.get(name), (int, float)) and test(value) for row in rows)


def _mean(rows: Rows, name: str) -> float:
    values = [value for row in rows if isinstance(value := row.get(name), (int, float))]
    return sum(values) / len(values)
