"""What the parts of envkit ask of each other. Matching a protocol is enough; nothing needs to be inherited."""

from envkit.protocols.sandboxes import Sandbox, SandboxBackend, SandboxPool, Shell
from envkit.protocols.training import Engine, Renderer, Trainer, WeightSink
from envkit.protocols.worlds import (
    AskingEpisode,
    EnvHost,
    Episode,
    EpisodePlayer,
    Expert,
    LastingEpisode,
    LastingHost,
    Player,
    WatchedHost,
)

__all__ = [
    "AskingEpisode",
    "Engine",
    "EnvHost",
    "Episode",
    "EpisodePlayer",
    "Expert",
    "LastingEpisode",
    "LastingHost",
    "Player",
    "Renderer",
    "Sandbox",
    "SandboxBackend",
    "SandboxPool",
    "Shell",
    "Trainer",
    "WatchedHost",
    "WeightSink",
]
