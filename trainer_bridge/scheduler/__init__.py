"""Which episodes are played when, and which are trained on: groups, places, policy lag, filters and accounting.

Nothing here imports torch.
"""

from .once import Rollout, RolloutResult

__all__ = ["Rollout", "RolloutResult"]
