"""The section `algorithm` of a training file: a preset, and the parts that it combines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializeAsAny, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from envkit.config.grammar import Count, Section
from envkit.config.kinds import ByKind

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"advantage": {"kind": "group_normalised"}, "loss": {"kind": "clipped"}, "minibatches": 2},
    "reinforce": {"advantage": {"kind": "batch_normalised", "gamma": 0.9}, "loss": {"kind": "reinforce"}},
    "ppo": {"advantage": {"kind": "gae", "gamma": 0.95}, "loss": {"kind": "clipped"}, "minibatches": 2},
}
"""The presets by name, as contents of the section `algorithm`.

    grpo       as in Shao et al. 2024 (DeepSeekMath): episode returns, normalised over each group; clipped ratio. The
               loss is a mean over tokens (Yu et al. 2025, DAPO), not over sequences, and the discount is per turn.
    reinforce  Williams 1992: turn returns, normalised over the batch (ReBN of GEM, Liu et al. 2025)
    ppo        Schulman et al. 2017: a critic and generalised advantage estimates over turns; clipped ratio
"""


class PartSection(Section):
    """A part of the algorithm. The kind decides about the other keys."""

    kind: str
    """Name of the part."""


class AdvantageSection(PartSection):
    """How much better each token was than expected."""


class LossSection(PartSection):
    """The loss of each token of the policy."""


class AggregationSection(PartSection):
    """The weight of each token's loss in an update."""


class CorrectionSection(PartSection):
    """The weight that makes up for the difference between the sampler's and the trainer's probabilities."""


def _nothing_required(schema: dict[str, Any]) -> None:
    """Remove the list of required keys: `completed` adds the parts that a file leaves out."""
    del schema["required"]


class AlgorithmSection(Section):
    """The learning algorithm: a preset and changes to it. A part is the name of its kind, or a section with its keys.
    If it has the preset's kind, or no kind, keys that are left out have the preset's values.
    """

    model_config = ConfigDict(json_schema_extra=_nothing_required)

    preset: str = "grpo"
    """grpo, reinforce or ppo."""
    advantage: SerializeAsAny[Annotated[AdvantageSection, ByKind("advantages", may_be_name=True)]]
    """group_normalised, batch_normalised or gae."""
    loss: SerializeAsAny[Annotated[LossSection, ByKind("losses", may_be_name=True)]]
    """clipped, reinforce or imitation."""
    aggregation: SerializeAsAny[Annotated[AggregationSection, ByKind("aggregations", may_be_name=True)]]
    """token_mean or rollout_mean."""
    correction: SerializeAsAny[Annotated[CorrectionSection, ByKind("corrections", may_be_name=True)]] | None = None
    """tis. null: none."""
    advantage_clip: Annotated[float, Field(gt=0)] | None = None
    """Maximum absolute value of an advantage. null: no maximum."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the policy before reinforcement learning: the k3 estimate, whose gradient is
    that of KL(reference, policy) for samples of the current policy. 0: no reference policy is loaded."""
    epochs: Count = 1
    """Passes over the samples of one train step."""
    minibatches: Count = 1
    """Optimiser updates per pass. The presets grpo and ppo have 2."""
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    """Log-probabilities that ratios are relative to. sampled: those of the engine. recomputed: those that the trainer
    computes before the first update of a train step, which takes one more pass."""

    @classmethod
    def completed(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content with the values of the preset."""
        name = content.get("preset", "grpo")
        if not isinstance(name, str) or name not in PRESETS:
            message = f"no algorithm is called {name!r}; there are: {', '.join(PRESETS)}"
            error = PydanticCustomError("preset", "{message}", {"message": message})
            raise ValidationError.from_exception_data(
                "algorithm", [InitErrorDetails(type=error, loc=("preset",), input=name)]
            )
        whole: dict[str, Any] = {"aggregation": {"kind": "token_mean"}, **PRESETS[name]}
        for key, value in content.items():
            usual = whole.get(key)
            if isinstance(value, str) and isinstance(usual, dict):
                value = {"kind": value}
            if isinstance(value, dict) and isinstance(usual, dict) and value.get("kind") in (None, usual["kind"]):
                value = {**usual, **{name: one for name, one in value.items() if one is not None}}
            if value is not None or key == "correction":
                whole[key] = value
        return whole


def default_algorithm() -> AlgorithmSection:
    """Return the section of a training file that leaves it out."""
    return AlgorithmSection.model_validate({})
