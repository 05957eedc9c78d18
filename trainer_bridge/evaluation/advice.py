"""Warnings about evaluations whose success rate does not measure a language model's skill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from envkit.trainer_bridge.evaluation.outcomes import VALID, EpisodeOutcome, total_usage
from envkit.types import StopReason

_MANY_CUT = 0.5
_FEW_VALID = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the episodes of a language model. Warnings quote them.

    Attributes:
        turn_tokens: Maximum tokens of one answer.
        max_turns: Maximum turns of an episode.
        max_tokens: Maximum tokens of an episode; None if only the model's context limits it.
    """

    turn_tokens: int
    max_turns: int
    max_tokens: int | None


def advice(tasks: Sequence[Sequence[EpisodeOutcome]], limits: Limits) -> list[str]:
    """Return warnings about episodes and answers that were cut off, and about invalid answers, with remedies."""
    valid = [one for task in tasks for one in task if one.error is None]
    usage = total_usage(tasks)
    stops = {
        StopReason.MAX_TURNS: f"--max-turns ({limits.max_turns})",
        StopReason.CONTEXT_OVERFLOW: "the end of the model's context"
        if limits.max_tokens is None
        else f"--max-tokens ({limits.max_tokens})",
    }
    counts = {name: sum(one.stop is stop for one in valid) for stop, name in stops.items()}
    parts = [f"{count} of {len(valid)} episodes reached {name}" for name, count in counts.items() if count]
    if usage.cut:
        share_cut = usage.cut / usage.completions
        parts.append(f"{share_cut:.1%} of the answers reached --turn-tokens ({limits.turn_tokens})")
    lines = [f"cut off: {', '.join(parts)}"] if parts else []
    if not usage.completions:
        remedy = "shorten the prompt" if limits.max_tokens is None else "raise --max-tokens, or shorten the prompt"
        return [*lines, f"no prompt left room for an answer: {remedy}"] if lines else []
    if usage.cut and usage.cut >= usage.completions * _MANY_CUT:
        lines.append("most answers were cut off: raise --turn-tokens, or ask for shorter answers with --system")
    forms = [one.metrics[VALID] for one in valid if VALID in one.metrics]
    if forms and (share_valid := math.fsum(forms) / len(forms)) < _FEW_VALID:
        valid_answers = f"only {share_valid:.1%} of the answers were" if share_valid else "no answer was"
        lines.append(
            f"{valid_answers} valid: the model does not use the answer format of the environment, so the success rate "
            "does not measure its skill; read the answers (--output DIR, then envkit show DIR), then try --system with "
            "an example of the format, or a model that follows instructions"
        )
    return lines
