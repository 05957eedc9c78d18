"""Playing episodes with a policy: one coroutine per episode, gates between them, and groups of episodes."""

from .gates import Lockstep, OpenGate
from .play import RolloutLimits, play
from .rollout import Rollout, RolloutResult

__all__ = ["Lockstep", "OpenGate", "Rollout", "RolloutLimits", "RolloutResult", "play"]
