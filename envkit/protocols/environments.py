"""Protocols of environments, hosts and players."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from envkit.types import (
    GenerationRecord,
    Observation,
    Reset,
    Step,
    Task,
    TenantKey,
)

if TYPE_CHECKING:
    from asyncio import Future

    from msgspec import Raw


class Episode(Protocol):
    """An episode of a task. The interface is the same in this process, over HTTP and in a sandbox."""

    async def reset(self) -> Reset:
        """Start the episode. Must be called once, before the first step.

        Raises:
            OptionError: The environment rejects an option of the task.
            EnvError: The environment raised.
            SandboxLostError: Its sandbox was lost.
        """
        ...

    async def step(self, action: str) -> Step:
        """Play one action. An invalid action leads to an observation, never to an exception.

        Raises:
            StepOrderError: The step was called before `reset`, or after the end of the episode.
            EnvError: The environment raised.
            SandboxLostError: Its sandbox was lost.
        """
        ...


class EnvHost(Protocol):
    """Leases episodes: in slots of this process, from a served fleet, or in sandboxes."""

    @property
    def capacity(self) -> int:
        """Maximum number of concurrent episodes."""
        ...

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        """Lease an episode of `task` for the block. Waits for a free slot.

        Raises:
            UnknownEnvError: No environment has the task's id.
        """
        ...


@runtime_checkable
class ResumableEpisode(Episode, Protocol):
    """An episode that runs on a server under an id. A new client can resume the episode with this id."""

    @property
    def turn(self) -> int:
        """Number of steps played so far; 0 for a new episode."""
        ...

    async def repeat_step(self, action: str) -> Step:
        """Return the result of the last step again; `action` is the action of that step.

        Raises:
            SessionConflictError: The last step had another action.
        """
        ...


@runtime_checkable
class SplitStepEpisode(ResumableEpisode, Protocol):
    """An episode whose steps are split in two calls, so that no task has to wait for the answer.

    A waiting task would take most of the time that a remote step needs.
    """

    def start_step(self, action: str) -> Future[Raw] | None:
        """Start a step and return its future, which the caller may cancel; None if only `step` can play this step.

        Raises:
            EnvkitError: As for `step`.
        """
        ...

    def finish_step(self, answer: Future[Raw]) -> Step:
        """Decode the answer to a started step.

        Raises:
            SandboxLostError, UnreachableError: It is unknown whether the step was played. Call `step` with the same
                action.
            EnvkitError: As for `step`.
        """
        ...


@runtime_checkable
class ResumableHost(EnvHost, Protocol):
    """A host whose episodes may outlive the host. The next host with the same ledger can resume each by its key."""

    def lease_as(self, key: TenantKey, task: Task) -> AbstractAsyncContextManager[Episode]:
        """Lease an episode as `lease` does, but resume the episode of this key if it has the same task.

        Args:
            key: Key of the episode. Losses of sandboxes that the episode causes count against its tenant.
            task: Its task.
        """
        ...

    def resumable_task(self, key: TenantKey) -> Task | None:
        """Return the task of the resumable episode with this key; None if there is no such episode."""
        ...

    def resumable_keys(self) -> Sequence[TenantKey]:
        """Return the keys of the resumable episodes."""
        ...


@runtime_checkable
class ReadinessHost(EnvHost, Protocol):
    """A host that reports whether it can start episodes. A fleet, for example, cannot if all its sandboxes are lost."""

    @property
    def why_unready(self) -> str:
        """Why no episode can start now, in one line; empty if episodes can start."""
        ...


class Expert(Protocol):
    """A policy that solves an environment. It gives hints to people and writes demonstrations for training."""

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return all moves on a shortest path to success, best first; empty if there is no path."""
        ...

    def is_hazardous(self, observation: Observation) -> bool:
        """Return whether a careless move loses in this state; demonstrations should include such states."""
        ...

    def answer(self, move: str) -> str:
        """Return the text with which a language model would answer to play `move`."""
        ...


class EpisodePlayer(Protocol):
    """Plays one episode."""

    @property
    def generation(self) -> GenerationRecord | None:
        """The language model's last prompt and completion; None if the player uses no language model."""
        ...

    async def act(self, observation: Observation) -> str:
        """Choose an action. The call may wait, for example for a server that runs a model."""
        ...


class Player(Protocol):
    """A policy that `envkit eval` evaluates; `begin` returns a separate player for each episode."""

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        """Return the player of one episode of `task`.

        `start` is the result of the episode's reset. The player takes all its random numbers from `rng`.
        """
        ...
