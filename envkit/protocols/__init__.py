"""Protocols between the parts of envkit. An implementation inherits only for the methods with defaults."""

from envkit.protocols.environments import EnvHost, Episode, Judge, NamedTaskSet, NotedTaskSet, TaskSet
from envkit.protocols.launch import Launcher, Process
from envkit.protocols.players import EpisodePlayer, Expert, Player, TaskExpert, expert_for
from envkit.protocols.sandboxes import Program, Sandbox, SandboxBackend, SandboxPool, ServerPool, Shell
from envkit.protocols.training import (
    Engine,
    FetchingEngine,
    FreezableEngine,
    Gate,
    PhasedTrainer,
    PolicyEngine,
    Renderer,
    Tracker,
    Trainer,
)

__all__ = [
    "Engine",
    "EnvHost",
    "Episode",
    "EpisodePlayer",
    "Expert",
    "FetchingEngine",
    "FreezableEngine",
    "Gate",
    "Judge",
    "Launcher",
    "NamedTaskSet",
    "NotedTaskSet",
    "PhasedTrainer",
    "Player",
    "PolicyEngine",
    "Process",
    "Program",
    "Renderer",
    "Sandbox",
    "SandboxBackend",
    "SandboxPool",
    "ServerPool",
    "Shell",
    "TaskExpert",
    "TaskSet",
    "Tracker",
    "Trainer",
    "expert_for",
]
