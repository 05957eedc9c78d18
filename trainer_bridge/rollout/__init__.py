"""Playing episodes: one coroutine per episode, its player, gates between episodes, and groups of episodes."""

from .episode import RolloutLimits, play
from .gates import Lockstep, OpenGate
from .players import PolicyPlayer
from .rollout import Rollout, RolloutResult

__all__ = ["Lockstep", "OpenGate", "PolicyPlayer", "Rollout", "RolloutLimits", "RolloutResult", "play"]
