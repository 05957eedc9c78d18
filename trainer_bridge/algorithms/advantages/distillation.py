"""On-policy distillation: a teacher grades each token."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Rate

from ..parts import Advantages, Part, Rollouts
from ..terms import kl_estimate


class Distillation(AdvantageSection):
    """The reference policy, as the teacher, grades each token; rewards do not count."""

    kind: Literal["distillation"] = "distillation"
    coefficient: Rate = 1.0
    """Factor of the advantages."""


def distillation(rollouts: Rollouts, section: Distillation) -> Advantages:
    """Return coefficient * (reference_logp - old_logp), bounded to 20 nats before the factor.

    Its mean over tokens of the policy is the negative of KL(policy, reference) for the next token, the reverse KL
    divergence. The divergence of later tokens does not count.
    """
    assert rollouts.reference_logp_N is not None, "distillation needs log-probabilities of the reference policy"
    divergence_N = kl_estimate(rollouts.old_logp_N.double(), rollouts.reference_logp_N.double(), "k1")
    return Advantages((-section.coefficient * divergence_N).float())


PART = Part(
    distillation,
    Distillation,
    frozenset({"reference"}),
    "Agarwal et al. 2024, On-Policy Distillation of Language Models; Lu et al. 2025, On-Policy Distillation",
)
