"""Data types that environments and players exchange: tasks, observations, and results of resets and steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from envkit.types.plain import Info, Options

Role: TypeAlias = Literal["user", "tool"]
ToolSchema: TypeAlias = dict[str, Any]
"""A tool in the format of the OpenAI API: ``{"type": "function", "function": {"name", "description", "parameters"}}``.

``parameters`` is a JSON schema of the arguments.
"""


@dataclass(frozen=True, slots=True)
class Task:
    """A task. Equal tasks start with the same level and meet the same random events in any process on any machine.

    Attributes:
        env_id: Id of a registered environment, such as ``"Sokoban-v0"``.
        seed: Non-negative seed from which the environment generates the level and its random events.
        options: Values for options of the environment, by name. Other options keep their defaults.
    """

    env_id: str
    seed: int
    options: Options = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text that identifies the task; equal tasks have the same key."""
        return json.dumps([self.env_id, self.seed, dict(self.options)], sort_keys=True, separators=(",", ":"))


# A msgspec struct is created eight times as fast as a dataclass. This matters because every step creates observations.
class Observation(msgspec.Struct, frozen=True):
    """An observation: the environment's message to the player before its next action.

    Attributes:
        text: Text for a language model.
        legal_moves: Names of the legal moves; empty if the environment does not report legal moves.
        images: Images as PNG files in base64; empty if the environment only has text.
        role: ``"tool"`` for the result of a tool call, otherwise ``"user"``.
    """

    text: str
    legal_moves: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    role: Role = "user"


DEADLINE_GRACE_S = 30.0
"""Seconds beyond a limit of an environment itself before a caller gives up."""


def deadline_s(timeout_s: float, limit_s: float | None) -> float:
    """Return the seconds after which to give up waiting for an environment.

    A missed deadline makes the episode void, but reaching a limit of the environment is a result. A deadline is
    therefore longer than the limits inside it (command < step < grader < episode), in runs, servers and clients alike.

    Args:
        timeout_s: Seconds that the caller is configured with.
        limit_s: The limit of the environment itself, such as `Reset.step_limit_s`; None for no limit.
    """
    return timeout_s if limit_s is None else max(timeout_s, limit_s + DEADLINE_GRACE_S)


class Reset(msgspec.Struct, frozen=True):
    """Result of a reset. It unpacks like the result of ``gymnasium.Env.reset``: ``observation, info = reset``.

    Attributes:
        observation: The first observation.
        info: The environment's info.
        system: System prompt of the environment; None if it has none.
        tools: The tools that the player may call.
        is_graded: Whether the reward of the episode is only complete after `envkit.protocols.Episode.grade`.
        step_limit_s: Maximum seconds of a step by the limits of the environment itself, such as that of a command;
            None if it has no such limit. Callers wait longer; see `deadline_s`.
        grade_limit_s: The same for the programs of its grader.
        episode_limit_s: The same for all steps together.
    """

    observation: Observation
    info: Info
    system: str | None = None
    tools: tuple[ToolSchema, ...] = ()
    is_graded: bool = False
    step_limit_s: float | None = None
    grade_limit_s: float | None = None
    episode_limit_s: float | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.observation, self.info))


class Step(msgspec.Struct, frozen=True):
    """Result of one action. It unpacks into five values, like the result of ``gymnasium.Env.step``."""

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


@dataclass(frozen=True, slots=True)
class Submission:
    """A submission of a player to a grader.

    Attributes:
        text: The answer, or an empty text.
        files: Contents of files by their paths, which are relative to the workspace of a sandbox, or absolute.
    """

    text: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
