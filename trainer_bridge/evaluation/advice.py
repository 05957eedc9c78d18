"""Warnings about evaluations whose success rate does not measure a language model's skill."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from envkit.types import StopReason

from ..rollout import RolloutLimits
from .outcomes import EvaluatedEpisode, total_usage
from .statistics import VALID

_MANY_CUT = 0.5
_FEW_VALID = 0.5


def advice(tasks: Sequence[Sequence[EvaluatedEpisode]], limits: RolloutLimits) -> list[str]:
    """Return warnings about episodes and answers that were cut off, and about invalid answers, with remedies."""
    valid = [one for task in tasks for one in task if not one.outcome.is_void]
    usage = total_usage(tasks)
    stops = {
        StopReason.MAX_TURNS: f"rollout.max_turns ({limits.max_turns})",
        StopReason.CONTEXT_OVERFLOW: f"rollout.max_tokens ({limits.max_tokens})",
        StopReason.PLAYER_TIMEOUT: f"rollout.player_timeout_s ({limits.player_timeout_s})",
    }
    counts = Counter(one.outcome.stop for one in valid)
    parts = [f"{counts[stop]} of {len(valid)} episodes reached {name}" for stop, name in stops.items() if counts[stop]]
    if usage.cut:
        share_cut = usage.cut / usage.completions
        parts.append(f"{share_cut:.1%} of the answers reached rollout.turn_tokens ({limits.turn_tokens})")
    lines = [f"cut off: {', '.join(parts)}"] if parts else []
    if refused := counts[StopReason.REFUSED]:
        lines.append(
            f"the endpoint refused a request in {refused} of {len(valid)} episodes, which count as failures: a prompt "
            "may be too long for the model, or stopped by a content filter"
        )
    if not usage.completions:
        if counts[StopReason.CONTEXT_OVERFLOW]:
            lines.append("no prompt left room for an answer: raise rollout.max_tokens, or shorten the prompt")
        if counts[StopReason.PLAYER_TIMEOUT]:
            lines.append("the model's time ended before its first answer: raise rollout.player_timeout_s")
        return lines
    if usage.cut and usage.cut >= usage.completions * _MANY_CUT:
        lines.append("most answers were cut off: raise --turn-tokens, or ask for shorter answers with --system")
    # An answer that was cut off says nothing about the format that the model uses.
    forms = [one.outcome.metrics[VALID] for one in valid if VALID in one.outcome.metrics and not one.usage.cut]
    if forms and (share_valid := math.fsum(forms) / len(forms)) < _FEW_VALID:
        valid_answers = f"only {share_valid:.1%} of the answers were" if share_valid else "no answer was"
        lines.append(
            f"{valid_answers} valid: the model does not use the answer format of the environment, so the success rate "
            "does not measure its skill; read the answers (--output DIR, then envkit show DIR), then try --system with "
            "an example of the format, or a model that follows instructions"
        )
    return lines
