"""Data types that environments and players exchange: tasks, observations and steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from envkit.types.plain import Info, Options


@dataclass(frozen=True, slots=True)
class Task:
    """A task. The same task gives the same episode in any process on any machine.

    Attributes:
        env_id: Id of a registered environment, such as ``"Sokoban-v0"``.
        seed: Non-negative seed of the level and its random events.
        options: Options of the environment that differ from its defaults.
    """

    env_id: str
    seed: int
    options: Options = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text that identifies the task; equal tasks have the same key."""
        return json.dumps([self.env_id, self.seed, dict(self.options)], sort_keys=True, separators=(",", ":"))


# This is a msgspec struct, which is created eight times as fast as a dataclass, because every step creates one.
class Observation(msgspec.Struct, frozen=True):
    """An observation.

    Attributes:
        text: Text for a language model.
        legal_moves: Names of the legal moves; empty if the environment does not list them.
        images: PNG files, base64; empty in text environments.
    """

    text: str
    legal_moves: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


class Reset(msgspec.Struct, frozen=True):
    """Result of a reset; unpacks into Gymnasium's two values."""

    observation: Observation
    info: Info

    def __iter__(self) -> Iterator[Any]:
        return iter((self.observation, self.info))


class Step(msgspec.Struct, frozen=True):
    """Result of one action; unpacks into Gymnasium's five values."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: Info

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    def __iter__(self) -> Iterator[Any]:
        return iter((self.observation, self.reward, self.terminated, self.truncated, self.info))
