"""The table of algorithms. This module does not import torch, so that `envkit check` can use it.

    grpo       Shao et al. 2024 (DeepSeekMath): episode returns, normalised over each group; clipped ratio
    reinforce  Williams 1992: turn returns, normalised over the batch (ReBN of GEM, Liu et al. 2025)
    ppo        Schulman et al. 2017: a critic and generalised advantage estimates over turns; clipped ratio

Advantages and losses are named functions in `advantages` and `losses`; a preset combines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from envkit.errors import ConfigError, did_you_mean

ADVANTAGES = ("group_normalised", "batch_normalised", "gae")
LOSSES = ("clipped", "reinforce")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The parameters of a learning algorithm.

    Attributes:
        advantage: Name in `ADVANTAGES`.
        loss: Name in `LOSSES`.
        gamma: Discount factor per turn, in [0, 1].
        gae_lambda: Lambda of the generalised advantage estimate, in [0, 1]; only for `gae`.
        clip: Half-width of the clipping range around ratio 1; only for `clipped`.
        entropy_coefficient: Weight of the entropy bonus.
        kl_coefficient: Weight of the KL divergence from the reference policy; at 0, no reference policy is loaded.
        value_coefficient: Weight of the critic's loss; only for `gae`.
        advantage_clip: Maximum absolute value of an advantage; None means no maximum.
        epochs: Passes over the samples of one train step.
        minibatches: Optimiser updates per pass.
    """

    advantage: str
    loss: str
    gamma: float = 1.0
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    value_coefficient: float = 0.5
    advantage_clip: float | None = None
    epochs: int = 1
    minibatches: int = 1

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm trains a critic."""
        return self.advantage == "gae"


PRESETS: Mapping[str, Algorithm] = {
    "grpo": Algorithm("group_normalised", "clipped", epochs=1, minibatches=2),
    "reinforce": Algorithm("batch_normalised", "reinforce", gamma=0.9),
    "ppo": Algorithm("gae", "clipped", gamma=0.95, gae_lambda=0.95, epochs=1, minibatches=2),
}


def resolve(preset: str, changes: Mapping[str, Any]) -> Algorithm:
    """Return the preset, overridden by those `changes` that are not None.

    Raises:
        ConfigError: The preset, advantage or loss is unknown.
    """
    if preset not in PRESETS:
        raise ConfigError([f"algorithm.preset: no algorithm is called {preset!r}{did_you_mean(preset, PRESETS)}"])
    known = {field.name for field in fields(Algorithm)}
    made = {key: value for key, value in changes.items() if value is not None and key in known}
    algorithm = replace(PRESETS[preset], **made)
    problems = []
    if algorithm.advantage not in ADVANTAGES:
        near = did_you_mean(algorithm.advantage, ADVANTAGES)
        problems.append(f"algorithm.advantage: no advantage is called {algorithm.advantage!r}{near}")
    if algorithm.loss not in LOSSES:
        near = did_you_mean(algorithm.loss, LOSSES)
        problems.append(f"algorithm.loss: no loss is called {algorithm.loss!r}{near}")
    if problems:
        raise ConfigError(problems)
    return algorithm
