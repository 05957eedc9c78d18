"""The advantage `attention_credit` and its keys. Axes: N policy tokens. Without torch at import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Count, Share
from envkit.trainer_bridge.algorithms.advantages.group_normalised import GroupNormalised, group_normalised
from envkit.trainer_bridge.algorithms.parts import Advantages, Part, Rollouts


class AttentionCredit(AdvantageSection):
    """The advantage `group_normalised`, times a factor of at least 1 for each token."""

    kind: Literal["attention_credit"] = "attention_credit"
    strategy: Literal["local", "global", "coupled"] = "coupled"
    """local: scale preplan tokens, where WAAD changes most. global: scale anchors, the tokens with the highest FAI.
    coupled: scale anchors, which share their bonus with the preplan tokens that introduce them."""
    amplification: Annotated[float, Field(ge=1)] = 1.5
    """Factor of a scaled token."""
    share: Share = 0.4
    """Share of an episode's tokens that are preplan tokens, and share that are anchors."""
    scales_negative: bool = False
    """Whether negative advantages are scaled, too."""
    window: Count = 10
    """Largest distance in tokens that WAAD counts."""
    horizon: tuple[Count, Count] = Field(default=(10, 50), strict=False)
    """Smallest and largest distance in tokens of the later tokens whose attention FAI averages."""
    introduction: Count = 3
    """Number of tokens before an anchor among which its preplan token is."""
    handover: Share = 0.5
    """Part of its bonus that an anchor hands over to its preplan token."""
    heads: Share = 0.3
    """Share of the attention heads that are local, and share that are global."""
    layers: Count = 5
    """Number of layers whose heads are used; they are spread over the middle third of the model."""
    pass_tokens: Count = 4096
    """Maximum number of tokens in a forward pass, including padding. A longer episode has its own pass."""
    episode: GroupNormalised = Field(default_factory=GroupNormalised)
    """Keys of the episode's advantage."""


def attention_credit(rollouts: Rollouts, section: AttentionCredit) -> Advantages:
    """Return A * factor for each token, with the advantage A of `group_normalised` and the factor of `maps.factors`.

    Negative advantages have the factor 1, unless `scales_negative` is true. Episodes without an advantage to scale take
    no forward pass.
    """
    from .forward import measured

    advantage_N = group_normalised(rollouts, section.episode).advantage_N.clone()
    sizes = [sample.num_policy_tokens for sample in rollouts.samples]
    parts = advantage_N.split(sizes)  # type: ignore[no-untyped-call]  # views
    chosen = [number for number, part in enumerate(parts) if (part != 0 if section.scales_negative else part > 0).any()]
    factors = measured(rollouts.model, [rollouts.samples[number] for number in chosen], section)
    for number, factor in zip(chosen, factors, strict=True):
        parts[number].mul_(factor)
    return Advantages(advantage_N)


PART = Part(
    attention_credit,
    AttentionCredit,
    frozenset({"groups", "sequences"}),
    "Li et al. 2025, Attention Illuminates LLM Reasoning (arXiv 2510.13554v1), sections 4.1 and 5",
)
