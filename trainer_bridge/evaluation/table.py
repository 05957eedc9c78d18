"""The result of an evaluation as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from envkit.runs.printable import counted

from .result import Evaluation
from .statistics import CUT, Estimate, Stratum, is_share

_NAMES = {
    "action_is_valid": "valid answers",
    "action_is_effective": "effective actions",
    CUT: "answers cut off",
    "success_uncut": "success, if not cut off",
    "return_uncut": "return, if not cut off",
    "flips": "tasks that flip",
    "tool_call_no_call": "turns without a call",
}
_CALLS = "tool_call_"
"""Start of the names of metrics that are shown only if they are not zero."""
_MAX_STRATA = 12
"""Maximum number of rows of success by difficulty."""


def lines(found: Evaluation) -> Iterator[str]:
    """Yield the lines of a result: metrics with intervals, how the episodes ended, tokens, difficulty and notes."""
    times = f" ({found.attempts} attempts at each task)" if found.attempts > 1 else ""
    earlier = f", {found.resumed} of them earlier" if found.resumed else ""
    episodes = counted(found.episodes, "episode")
    yield f"{found.policy} on {found.env_id}: {episodes}{times} in {found.seconds:.1f} s{earlier}"
    if found.void:
        causes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found.void_by_cause.items())
        by_agent = f"; {found.void_by_agent} of them by programs in their sandbox" if found.void_by_agent else ""
        yield f"{found.void} more were lost ({causes}{by_agent}) and do not count: {found.error}"
    shown = {name: one for name, one in found.metrics.items() if one.mean or not name.startswith(_CALLS)}
    yield from table([("", "mean", "95 % interval"), *(row(name, one) for name, one in shown.items())])
    total = found.episodes + found.void
    ends = (f"{name.replace('_', ' ')} {count} ({count / total:.1%})" for name, count in found.endings.items())
    yield f"endings: {', '.join(ends)}"
    if found.success_rule.startswith("unknown"):
        yield f"success is {found.success_rule}; see docs/write-an-environment.md"
    if count := found.usage.completions:
        used = found.usage
        yield (
            f"{counted(count, 'answer')}: {used.prompt_tokens:,} tokens read, {used.completion_tokens:,} written, "
            f"{used.seconds / count:.2f} s per answer"
        )
        player_s, env_s = found.player_seconds_per_episode, found.env_seconds_per_episode
        yield f"seconds per episode: {player_s:.2f} for the model, {env_s:.2f} in the environment"
    if found.levels:
        yield "success by shortest solution"
        head = ("moves", "mean", "95 % interval", "episodes")
        yield from table([head, *(_stratum(one) for one in found.by_difficulty(most=_MAX_STRATA))])
    if found.notes:
        yield "notes"
        yield from (f"  {line}" for line in found.notes)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows, with the first column aligned left and all other columns aligned right."""
    width = max(len(name) for name, *_ in rows)
    for name, mean, interval, *rest in rows:
        yield "  ".join([f"  {name:<{width}}", f"{mean:>8}", f"{interval:>16}", *(f"{one:>9}" for one in rest)])


def row(name: str, estimate: Estimate) -> tuple[str, str, str]:
    """Return the label, mean and interval of a metric."""
    mean, low, high = (f"{value:.1%}" if is_share(name) else f"{value:.2f}" for value in estimate)
    return _NAMES.get(name, name.replace("_", " ")), mean, f"{low} – {high}"


def _stratum(one: Stratum) -> tuple[str, str, str, str]:
    moves = str(one.shortest) if one.shortest == one.longest else f"{one.shortest}-{one.longest}"
    _, mean, interval = row("success", one.success)
    return moves, mean, interval, str(one.episodes)
