"""Protocols of environments, their hosts and their graders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from envkit.types import (
    Reset,
    Step,
    Submission,
    Task,
    TenantKey,
)

if TYPE_CHECKING:
    from asyncio import Future

    from msgspec import Raw


class Episode(Protocol):
    """An episode of a task. The interface is the same whether it runs in this process, on a server or in a sandbox."""

    async def reset(self) -> Reset:
        """Start the episode. Must be called once, before the first step.

        Raises:
            OptionError: The environment rejects an option of the task.
            EnvError: The environment raised an exception.
            SandboxLostError: The environment's sandbox was lost.
        """
        ...

    async def step(self, action: str) -> Step:
        """Play one action. For an invalid action, the environment returns an observation as usual and raises nothing.

        Raises:
            StepOrderError: `step` was called before `reset`, or after the end of the episode.
            EnvError: The environment raised an exception.
            SandboxLostError: The environment's sandbox was lost.
        """
        ...


@runtime_checkable
class GradedEpisode(Episode, Protocol):
    """An episode whose reward may only be complete after a grader has run; see `Reset.is_graded`."""

    async def grade(self) -> float | None:
        """Return the reward that the grader adds to those of the steps; None if the grader could not run.

        Called at most once, after the last step of the player: at the end of the episode, or earlier if the player
        stops. No step may follow. None says nothing about the player, so the episode is void and is played again.

        Raises:
            EnvError: The environment raised an exception.
            SandboxLostError: The environment's sandbox was lost.
        """
        ...


class EnvHost(Protocol):
    """Runs episodes, and leases them to callers. The episodes run in this process, on a server, or in sandboxes."""

    @property
    def capacity(self) -> int:
        """Maximum number of concurrent episodes."""
        ...

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        """Lease an episode of `task` for the duration of the block. If all slots are in use, wait for a free one.

        Raises:
            UnknownEnvError: No environment is registered under the id `task.env_id`.
        """
        ...


@runtime_checkable
class ResumableEpisode(Episode, Protocol):
    """An episode that runs on a server under an id, with which another client can resume the episode."""

    @property
    def turn(self) -> int:
        """Number of steps played so far."""
        ...

    async def repeat_step(self, action: str) -> Step:
        """Return the result of the last step again, for a client that did not receive it. This plays no step.

        Raises:
            SessionConflictError: The last step was played with an action other than `action`.
        """
        ...


@runtime_checkable
class SplitStepEpisode(ResumableEpisode, Protocol):
    """An episode whose step can be split into two calls, which start the step and decode its answer.

    This is faster than `step`, which needs a waiting asyncio task: the task takes most of the time of a remote step.
    """

    def start_step(self, action: str) -> Future[Raw] | None:
        """Start a step and return the future of its answer, which the caller may cancel.

        If the step cannot be started in this way, return None; the caller then calls `step` instead. Raises the same
        errors as `step`.
        """
        ...

    def finish_step(self, answer: Future[Raw]) -> Step:
        """Return the result of a step that `start_step` started, after its future `answer` is done.

        Raises:
            SandboxLostError, UnreachableError: It is unknown whether the environment has played the step. Call `step`
                with the same action.
            EnvkitError: As for `step`.
        """
        ...


@runtime_checkable
class ResumableHost(EnvHost, Protocol):
    """A host whose episodes may outlive it. A later host with the same ledger can resume each episode by its key."""

    def lease_as(self, key: TenantKey, task: Task) -> AbstractAsyncContextManager[Episode]:
        """Lease an episode as `lease` does, but if the host has an episode with this key and task, resume that one.

        Args:
            key: Key of the episode. Losses of sandboxes that the episode causes count against the key's tenant.
            task: Task of the episode.
        """
        ...

    def resumable_task(self, key: TenantKey) -> Task | None:
        """Return the task of the episode with this key; None if this host cannot resume an episode with this key."""
        ...

    def resumable_keys(self) -> Sequence[TenantKey]:
        """Return the keys of the episodes that this host can resume."""
        ...


@runtime_checkable
class ReadinessHost(EnvHost, Protocol):
    """A host that reports whether it can start episodes. A fleet whose sandboxes are all lost, for example, cannot."""

    @property
    def why_unready(self) -> str:
        """Why no episode can start at present, in one line; empty if episodes can start."""
        ...


@runtime_checkable
class PartitionedHost(EnvHost, Protocol):
    """A host whose slots are divided into parts, each for certain environments."""

    def part_of(self, env_id: str, tenant: str) -> tuple[str, int]:
        """Return the name and the number of slots of the part that plays an environment for a tenant.

        Errors use the name after "slots for", so it says whose slots these are, such as ``environments with tools``.

        Raises:
            EnvkitError: The host refuses new episodes of this environment.
        """
        ...


@runtime_checkable
class QueueingHost(EnvHost, Protocol):
    """A host whose slots others may use too, so that leases may wait even if they are fewer than its capacity."""

    @property
    def queued(self) -> int:
        """Number of leases that wait for a slot, or for the host to be reachable."""
        ...


class TaskSet(Protocol):
    """The tasks of an environment, divided into splits."""

    @property
    def splits(self) -> Sequence[str]:
        """Names of the splits, such as ``train`` and ``eval``; at least one."""
        ...

    def count(self, split: str) -> int | None:
        """Return the number of tasks in `split`; None if there are arbitrarily many."""
        ...

    def task(self, split: str, index: int) -> Task:
        """Return task `index` of `split`, the same in every process. `index` is below `count`, if there is a count."""
        ...


class Judge(Protocol):
    """A language model that grades answers."""

    async def ask(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int = 512) -> str:
        """Return the model's answer to a chat, whose messages have a ``role`` and a ``content``.

        Raises:
            UnreachableError: The model's server gave no answer.
            TooLargeError: The chat does not fit into the model's context.
        """
        ...


class Grader(Protocol):
    """Grades submissions, after the episode."""

    async def grade(self, submission: Submission) -> float | None:
        """Return the reward of `submission`; None if the grader could not run, which says nothing about it."""
        ...
