"""Playing one episode: its coroutine, its player, and gates between episodes."""

from .episode import RolloutLimits, play
from .gates import Lockstep, OpenGate
from .players import PolicyPlayer

__all__ = ["Lockstep", "OpenGate", "PolicyPlayer", "RolloutLimits", "play"]
