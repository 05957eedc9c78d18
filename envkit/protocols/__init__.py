"""Protocols between the parts of envkit. An implementation needs the same methods, but no base class."""

from envkit.protocols.environments import (
    EnvHost,
    Episode,
    EpisodePlayer,
    Expert,
    Player,
    QueueingHost,
    ReadinessHost,
    ResumableEpisode,
    ResumableHost,
    SplitStepEpisode,
)
from envkit.protocols.sandboxes import (
    Program,
    Sandbox,
    SandboxBackend,
    SandboxPool,
    ServerPool,
    Shell,
)
from envkit.protocols.training import Engine, Gate, PolicyEngine, Renderer, Tracker, Trainer, WeightSink

__all__ = [
    "Engine",
    "EnvHost",
    "Episode",
    "EpisodePlayer",
    "Expert",
    "Gate",
    "Player",
    "PolicyEngine",
    "Program",
    "QueueingHost",
    "ReadinessHost",
    "Renderer",
    "ResumableEpisode",
    "ResumableHost",
    "Sandbox",
    "SandboxBackend",
    "SandboxPool",
    "ServerPool",
    "Shell",
    "SplitStepEpisode",
    "Tracker",
    "Trainer",
    "WeightSink",
]
