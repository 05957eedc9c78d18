"""Penalties of rewards, and the weight of the divergence from the reference policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envkit.config.algorithm import KlSection, OverlongSection

if TYPE_CHECKING:
    from torch import Tensor

_MAX_CHANGE = 0.2
"""Maximum relative change of the coefficient over `KlSection.horizon` episodes."""


def overlong_penalty(tokens_E: Tensor, section: OverlongSection) -> Tensor:
    """Return the penalty of episodes with these numbers of policy tokens: from 0 to `section.penalty`, in float32."""
    over_E = (tokens_E - section.max_tokens + section.buffer_tokens).float()
    return section.penalty * (over_E / section.buffer_tokens).clamp(0.0, 1.0)


class AdaptiveKl:
    """The weight of the divergence from the reference policy, which a target may change after each train step.

    Attributes:
        coefficient: The weight.
    """

    def __init__(self, section: KlSection) -> None:
        self._section = section
        self.coefficient = section.coefficient

    def adapt(self, divergence: float, episodes: int) -> None:
        """Adapt the weight to the mean divergence per token (nats) in a train step with this number of episodes."""
        section = self._section
        if section.target is not None:
            error = min(max(divergence / section.target - 1.0, -_MAX_CHANGE), _MAX_CHANGE)
            self.coefficient *= 1.0 + error * episodes / section.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]
