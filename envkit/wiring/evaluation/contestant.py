"""A policy that was found, and the player that was opened for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envkit.config import EvalConfig
from envkit.config.parts import AgentSection
from envkit.protocols import Player
from envkit.runs.episodes import Decode
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.types import JSON, Options

if TYPE_CHECKING:
    from envkit.http.client.chat import ChatClient

AT_ONCE = 16
"""Default number of concurrent episodes of a language model."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A player that was opened, what converts its tokens to text, facts about it for the result file, and the client of
    its endpoint if it has one.
    """

    player: Player
    decode: Decode = lambda ids: ""
    facts: Mapping[str, JSON] = field(default_factory=dict)
    client: ChatClient | None = None


@dataclass(frozen=True, slots=True)
class FoundPolicy:
    """A policy that was found, but whose model is not loaded yet.

    Attributes:
        opened: Function of the episodes' options. Returns a context manager that loads the policy.
        options: Options of the environment that the policy was trained with.
        temperature: Sampling temperature; None for a player without a language model.
        identity: Fingerprint of the policy's files; empty if unknown.
        warning: Warning for the user, in one line; may be empty.
        agent: The foreign agent that plays with the policy; None lets the policy play itself.
    """

    opened: Callable[[Options], AbstractAsyncContextManager[Contestant]]
    limits: RolloutLimits
    at_once: int
    options: Options = field(default_factory=dict)
    temperature: float | None = None
    identity: str = ""
    warning: str = ""
    agent: AgentSection | None = None


def num_envs(config: EvalConfig) -> int | None:
    """Return the maximum number of concurrent episodes; None if it was not set."""
    return config.env.num_envs if "num_envs" in config.env.model_fields_set else None
