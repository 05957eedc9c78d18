"""What flows between a world and who plays in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from envkit.types.plain import Info, Options


@dataclass(frozen=True, slots=True)
class Task:
    """What to play. The same task gives the same episode in any process on any machine.

    Attributes:
        env_id: Id of a registered environment, such as ``"Sokoban-v0"``.
        seed: Non-negative seed of the level and of its chances.
        options: What the environment is to do differently from its defaults.
    """

    env_id: str
    seed: int
    options: Options = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A canonical text, equal for equal tasks."""
        return json.dumps([self.env_id, self.seed, dict(self.options)], sort_keys=True, separators=(",", ":"))


class Observation(msgspec.Struct, frozen=True):  # made for every step, in an eighth of a dataclass's time
    """What the player sees.

    Attributes:
        text: What a language model reads.
        legal_moves: Names of the moves that the world understands; empty when they cannot be listed.
        images: PNG files, base64; empty for text worlds.
    """

    text: str
    legal_moves: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


class Reset(msgspec.Struct, frozen=True):
    """The start of an episode; unpacks as Gymnasium's two."""

    observation: Observation
    info: Info

    def __iter__(self) -> Iterator[Any]:
        return iter((self.observation, self.info))


class Step(msgspec.Struct, frozen=True):
    """The world's answer to one action; unpacks as Gymnasium's five."""

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
