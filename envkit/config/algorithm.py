"""The section `algorithm` of a training file: a preset, and the parts that it combines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializeAsAny

from envkit.config.grammar import Count, Section, UserPath
from envkit.config.kinds import ByKind, invalid

_CLIPPED_TWICE = {"loss": {"kind": "clipped"}, "minibatches": 2}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"advantage": {"kind": "group_normalised"}, **_CLIPPED_TWICE},
    "dr_grpo": {
        "advantage": {"kind": "group_normalised", "deviation": "none"},
        **_CLIPPED_TWICE,
        "aggregation": {"kind": "constant", "tokens": 128},
    },
    "dapo": {
        "advantage": {"kind": "group_normalised"},
        "loss": {"kind": "clipped", "clip_high": 0.28},
        "minibatches": 2,
    },
    "rloo": {
        "advantage": {"kind": "group_normalised", "baseline": "others", "deviation": "none"},
        "loss": {"kind": "reinforce"},
        "aggregation": {"kind": "constant"},
    },
    "reinforce": {"advantage": {"kind": "batch_normalised", "gamma": 0.9}, "loss": {"kind": "reinforce"}},
    "rebn": {"advantage": {"kind": "batch_normalised"}, **_CLIPPED_TWICE},
    "reinforce_plus_plus": {
        "advantage": {"kind": "reinforce_plus_plus"},
        **_CLIPPED_TWICE,
        "kl": {"coefficient": 0.01, "estimator": "k1", "place": "reward"},
    },
    "ppo": {"advantage": {"kind": "gae", "gamma": 0.95}, **_CLIPPED_TWICE},
    "gspo": {
        "advantage": {"kind": "group_normalised"},
        "loss": {"kind": "clipped", "ratio": "rollout", "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
        "aggregation": {"kind": "rollout_mean"},
        "minibatches": 2,
    },
    "cispo": {"advantage": {"kind": "group_normalised"}, "loss": {"kind": "cispo"}, "minibatches": 2},
    "topr": {
        "advantage": {"kind": "group_normalised", "deviation": "none"},
        "loss": {"kind": "topr"},
        "aggregation": {"kind": "constant"},
        "minibatches": 2,
    },
    "gigpo": {"advantage": {"kind": "gigpo"}, **_CLIPPED_TWICE},
    "lite_ppo": {"advantage": {"kind": "group_normalised", "deviation": "batch"}, **_CLIPPED_TWICE},
    "ipa": {
        "advantage": {"kind": "chunk_returns"},
        "loss": {"kind": "chunk_clipped"},
        "minibatches": 2,
        "old_logprobs": "recomputed",
    },
    "asyppo": {"advantage": {"kind": "asyppo"}, **_CLIPPED_TWICE, "entropy_coefficient": 0.01},
    "decoupled_ppo": {
        "advantage": {"kind": "gae", "gamma": 0.95},
        **_CLIPPED_TWICE,
        "correction": {"kind": "tis", "cap": 2.0},
        "old_logprobs": "recomputed",
    },
}
"""The presets by name, as contents of the section `algorithm`; `docs/algorithms.md` has sources and differences."""


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


class KlSection(Section):
    """The KL divergence from the reference policy, which is the policy before reinforcement learning unless
    `reference` names another one. Estimates are per token, with d = log(reference / policy).
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence. 0: none, and no reference policy is loaded."""
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = "k3"
    """k1: -d. k2: d^2 / 2. k3: exp(d) - 1 - d. In a loss, on samples of the current policy, k2 and k3_unbiased (k3
    times the ratio to the old policy) descend KL(policy, reference), k3 descends KL(reference, policy), and the
    gradient of k1 is 0 on average, so that it is refused."""
    place: Literal["loss", "reward"] = "loss"
    """loss: added to each token's loss. reward: subtracted from the reward of the token's turn, at the old policy."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Divergence per token (nats) that the coefficient is adapted to: after each train step, it is multiplied by
    1 + clip(divergence / target - 1, -0.2, 0.2) * episodes / horizon (Ziegler et al. 2019). null: it is constant."""
    horizon: Count = 10_000
    """Number of episodes over which the coefficient may change by 20 %."""


class OverlongSection(Section):
    """A penalty for long episodes (Yu et al. 2025, DAPO, section 3.4): with L tokens of the policy in the episode, the
    last turn's reward changes by -penalty * clip((L - max_tokens + buffer_tokens) / buffer_tokens, 0, 1).
    """

    max_tokens: Count
    """Number of tokens with the whole penalty."""
    buffer_tokens: Count
    """Number of tokens before it over which the penalty rises."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """The whole penalty."""


class AlgorithmSection(Section):
    """The learning algorithm: a preset and changes to it. A part is the name of its kind, or a section with its keys.
    If it has the preset's kind, or no kind, keys that are left out have the preset's values.
    """

    model_config = ConfigDict(json_schema_extra=_nothing_required)

    preset: str = "grpo"
    """Name of a preset; see docs/algorithms.md."""
    advantage: SerializeAsAny[Annotated[AdvantageSection, ByKind("advantages", may_be_name=True)]]
    """How much better each token was than expected."""
    loss: SerializeAsAny[Annotated[LossSection, ByKind("losses", may_be_name=True)]]
    """The loss of each token."""
    aggregation: SerializeAsAny[Annotated[AggregationSection, ByKind("aggregations", may_be_name=True)]]
    """The weight of each token's loss."""
    correction: SerializeAsAny[Annotated[CorrectionSection, ByKind("corrections", may_be_name=True)]] | None = None
    """The correction of the sampler's probabilities. null: none."""
    advantage_clip: Annotated[float, Field(gt=0)] | None = None
    """Maximum absolute value of an advantage. null: no maximum."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    kl: KlSection = Field(default_factory=KlSection)
    """The KL divergence from the reference policy."""
    reference: UserPath | None = None
    """Model folder, or name of a model of `envkit model list`, of the reference policy, or of the teacher of
    `distillation`; its tokenizer must be the policy's. null: the policy before reinforcement learning."""
    overlong: OverlongSection | None = None
    """A penalty for long episodes. null: none."""
    value_clip: Annotated[float, Field(gt=0)] | None = None
    """Maximum change of a critic's value in a train step: the larger one of the losses with and without this bound
    counts. null: no maximum."""
    epochs: Count = 1
    """Passes over the samples of one train step."""
    minibatches: Count = 1
    """Optimiser updates per pass; 2 in most presets, 1 in those with the loss reinforce."""
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    """Log-probabilities that ratios are relative to. sampled: those of the engine. recomputed: those that the trainer
    computes before the first update of a train step, which takes one more pass."""

    @classmethod
    def completed(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content with the values of the preset."""
        name = content.get("preset", "grpo")
        if not isinstance(name, str) or name not in PRESETS:
            raise invalid("preset", f"no algorithm is called {name!r}; there are: {', '.join(PRESETS)}")
        whole: dict[str, Any] = {"aggregation": {"kind": "token_mean"}, **PRESETS[name]}
        for key, value in content.items():
            usual = whole.get(key)
            if isinstance(value, str) and isinstance(usual, dict):
                value = {"kind": value}
            if isinstance(value, dict) and isinstance(usual, dict) and value.get("kind") in (None, usual.get("kind")):
                value = {**usual, **value, **({"kind": usual["kind"]} if "kind" in usual else {})}
            if value is not None or key == "correction":
                whole[key] = value
        return whole
