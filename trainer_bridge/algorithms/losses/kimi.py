"""The loss of Kimi k1.5: policy mirror descent."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import LossSection
from envkit.config.grammar import Rate

from ..parts import Part, PolicyLoss, Tokens
from ..terms import MAX_LOG_RATIO, total


class Kimi(LossSection):
    """The policy gradient, with a penalty for the distance from the old policy."""

    kind: Literal["kimi"] = "kimi"
    tau: Rate = 0.1
    """Weight of the squared log-ratio of each rollout."""


def kimi(tokens: Tokens, section: Kimi) -> PolicyLoss:
    """Return the loss of Kimi k1.5 per token.

        loss = -A * logp + tau / 2 * D^2 / n

    D is the sum of logp - old_logp over the n tokens of the rollout, each between -20 and 20 nats. The penalty of all
    its tokens together is thus tau / 2 * D^2.
    """
    difference_N = (tokens.logp_N - tokens.old_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sum_N = total(difference_N, tokens.segments, "rollout")
    mean_N = total(difference_N, tokens.segments, "rollout", mean=True)
    return PolicyLoss(-tokens.advantage_N * tokens.logp_N + section.tau / 2 * sum_N * mean_N)


PART = Part(kimi, Kimi, frozenset({"whole_rollouts"}), "Kimi Team 2025, Kimi k1.5, equation 3")
