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
)

if TYPE_CHECKING:
    from asyncio import Future

    from msgspec import Raw


class Episode(Protocol):
    """An episode of a task; the same interface in this process, over HTTP, and in a sandbox."""

    async def reset(self) -> Reset:
        """Start the episode; called once, before the first step.

        Raises:
            OptionError: The environment rejects an option of the task.
            EnvError: The environment raised.
            SandboxLostError: Its sandbox was lost.
        """
        ...

    async def step(self, action: str) -> Step:
        """Play one action. An invalid action gives an observation, never an exception.

        Raises:
            StepOrderError: Before `reset`, or after the end.
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
        """Lease an episode of `task` for the block; waits for a free slot.

        Raises:
            UnknownEnvError: No environment has the task's id.
        """
        ...


@runtime_checkable
class ResumableEpisode(Episode, Protocol):
    """An episode with an id on another server, where a new client can resume it."""

    @property
    def turn(self) -> int:
        """Number of steps played so far; 0 for a new episode."""
        ...

    async def repeat_step(self, action: str) -> Step:
        """Return the answer to the last step again; `action` is its action.

        Raises:
            SessionConflictError: The last step had another action.
        """
        ...


@runtime_checkable
class SplitStepEpisode(ResumableEpisode, Protocol):
    """An episode whose steps need no waiting task each, which is most of the cost of a remote step."""

    def start_step(self, action: str) -> Future[Raw] | None:
        """Start a step; None if only `step` can play it. The caller may cancel the future.

        Raises:
            EnvkitError: As `step`.
        """
        ...

    def finish_step(self, answer: Future[Raw]) -> Step:
        """Decode the answer to a started step.

        Raises:
            SandboxLostError, UnreachableError: The outcome is open: call `step` with the same action to resolve it.
            EnvkitError: As `step`.
        """
        ...


@runtime_checkable
class ResumableHost(EnvHost, Protocol):
    """A host whose episodes may outlive it: the next host with the same ledger resumes them by their keys."""

    def lease_as(self, key: str, task: Task) -> AbstractAsyncContextManager[Episode]:
        """As `lease`; resumes the episode of this key if it has the same task."""
        ...

    def resumable_task(self, key: str) -> Task | None:
        """Return the task of the resumable episode of this key, or None."""
        ...

    def resumable_keys(self) -> Sequence[str]:
        """Return the keys of the resumable episodes."""
        ...


@runtime_checkable
class ReadinessHost(EnvHost, Protocol):
    """A host that reports its readiness, such as a fleet, whose sandboxes may all be lost."""

    @property
    def why_unready(self) -> str:
        """Why no episode can start now, in one line; empty if one can."""
        ...


class Expert(Protocol):
    """The expert policy of an environment, for play and for demonstrations."""

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return all moves on a shortest path to success, best first; empty if there is no path."""
        ...

    def is_hazardous(self, observation: Observation) -> bool:
        """Return whether a careless player goes wrong here, so that the state is worth a lesson."""
        ...

    def answer(self, move: str) -> str:
        """Return the text that plays `move`, as a language model would write it."""
        ...


class EpisodePlayer(Protocol):
    """Plays one episode."""

    @property
    def generation(self) -> GenerationRecord | None:
        """The language model's last prompt and completion; None for other players."""
        ...

    async def act(self, observation: Observation) -> str:
        """Choose an action; may wait, such as for a server."""
        ...


class Player(Protocol):
    """A player of `envkit eval`."""

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        """Return the player of one episode of `task`, which began with `start`; `rng` is its only randomness."""
        ...
