"""What the parts of envkit ask of worlds and of who plays in them."""

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
    """One play of one task, as everybody who plays sees it: in this process, over HTTP, or in a sandbox."""

    async def reset(self) -> Reset:
        """Start the episode; called once, before the first step.

        Raises:
            OptionError: The task has an option that the world refuses.
            EnvError: The world raised.
            SandboxLostError: The place it ran in is gone.
        """
        ...

    async def step(self, action: str) -> Step:
        """Play one action. A senseless action is answered with an observation, never an exception.

        Raises:
            StepOrderError: Before `reset`, or after the end.
            EnvError: The world raised.
            SandboxLostError: The place it ran in is gone.
        """
        ...


class EnvHost(Protocol):
    """Somewhere episodes can be played: slots in this process, a served fleet, sandboxes."""

    @property
    def capacity(self) -> int:
        """Number of episodes that can be leased at once."""
        ...

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        """Give an episode of `task` for the length of the block, waiting while none is free.

        Raises:
            UnknownEnvError: No environment has the task's id.
        """
        ...


@runtime_checkable
class ResumableEpisode(Episode, Protocol):
    """An episode that is played elsewhere under a name, and goes on there when who plays it is replaced."""

    @property
    def turn(self) -> int:
        """Number of steps that were played when `reset` returned, or since; 0 for a new episode."""
        ...

    async def repeat_step(self, action: str) -> Step:
        """Ask for the answer to the last step once more; `action` is what was played.

        Raises:
            SessionConflictError: It was another one.
        """
        ...


@runtime_checkable
class SplitStepEpisode(ResumableEpisode, Protocol):
    """One whose steps can be asked for without a task that waits for each, which is most of what such a step costs."""

    def start_step(self, action: str) -> Future[Raw] | None:
        """Begin a step; None when only `step` can play it. Who asked may cancel the future.

        Raises:
            EnvkitError: Likewise.
        """
        ...

    def finish_step(self, answer: Future[Raw]) -> Step:
        """Return the step that was asked for, from the answer that came.

        Raises:
            SandboxLostError, UnreachableError: It is not over: `step` with the same action, next, says what becomes of
                it.
            EnvkitError: As `step` does.
        """
        ...


@runtime_checkable
class ResumableHost(EnvHost, Protocol):
    """A host whose episodes may outlive it: the next one on the same ledger finds them by their keys."""

    def lease_as(self, key: str, task: Task) -> AbstractAsyncContextManager[Episode]:
        """As `lease`; the episode of this key goes on if there is one of the same task."""
        ...

    def resumable_task(self, key: str) -> Task | None:
        """Return what the episode of this key plays; None where there is none that could go on."""
        ...

    def resumable_keys(self) -> Sequence[str]:
        """Return the keys of the episodes that could go on."""
        ...


@runtime_checkable
class ReadinessHost(EnvHost, Protocol):
    """A host that may be unable to play although it has places, such as one whose sandboxes are all lost."""

    @property
    def why_unready(self) -> str:
        """Why no episode can begin now, in one line; empty if one can."""
        ...


class Expert(Protocol):
    """A player that knows a world: plays the expert policy and teaches."""

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return every move that lies on a shortest way to success, best known first; empty if there is none."""
        ...

    def is_tricky(self, observation: Observation) -> bool:
        """Say whether a careless player goes wrong here, so that the state is worth a lesson."""
        ...

    def answer(self, move: str) -> str:
        """Return the text that plays `move`, as a language model would write it."""
        ...


class EpisodePlayer(Protocol):
    """Plays one episode."""

    @property
    def generation(self) -> GenerationRecord | None:
        """How a language model came to its last action; None for other players."""
        ...

    async def act(self, observation: Observation) -> str:
        """Choose an action; may wait, such as for a server."""
        ...


class Player(Protocol):
    """Plays episodes: what `envkit eval` plays with."""

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        """Return who plays one episode of `task`, which began with `start`; chances are drawn from `rng` alone."""
        ...
