"""Protocols of environments, their hosts and their graders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from envkit.errors import EnvError, StepOrderError
from envkit.types import Reset, Step, Task, TenantKey

if TYPE_CHECKING:
    from asyncio import Future

    from msgspec import Raw

    from envkit.protocols.sandboxes import Sandbox


class Episode(Protocol):
    """An episode of a task. The interface is the same whether it runs in this process, on a server or in a sandbox.

    Inherit from it to get the defaults.

    Raises:
        EnvError: From reset, step and grade: the environment raised an exception.
        SandboxLostError: The same: the environment's sandbox was lost.
    """

    async def reset(self) -> Reset:
        """Start the episode. Must be called once, before the first step.

        Raises:
            OptionError: The environment rejects an option of the task.
        """
        ...

    async def step(self, action: str) -> Step:
        """Play one action. For an invalid action, the environment returns an observation as usual and raises nothing.

        Raises:
            StepOrderError: `step` was called before `reset`, or after the end of the episode.
        """
        ...

    async def grade(self) -> float | None:
        """Return the reward that the grader adds to those of the steps; None if the grader could not run.

        Called at most once, and only if `Reset.is_graded`, after the last step of the player: at the end of the
        episode, or earlier if the player stops. No step may follow. None says nothing about the player, so the episode
        is void and is played again.

        Raises:
            EnvError: The host of the environment cannot grade episodes.
        """
        raise EnvError("the environment", "no grade: its host cannot grade episodes")

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox in which a foreign agent can work; None if this process has no sandbox of the episode."""
        return None

    @property
    def grader_output(self) -> str:
        """The end of what the grader printed; empty if that is unknown, as for episodes on a server."""
        return ""

    computes: bool = False
    """Whether `step_now` plays steps, so that they need no task."""

    def step_now(self, action: str) -> Step:
        """Play one action as `step` does, without ``await``."""
        raise StepOrderError("the episode does not compute its steps")

    @property
    def turn(self) -> int:
        """Number of steps played so far, on a server where another client may have played some of them."""
        return 0

    async def repeat_step(self, action: str) -> Step:
        """Return the result of the last step again, for a client that did not receive it. This plays no step.

        Raises:
            SessionConflictError: The last step was played with an action other than `action`.
            StepOrderError: The episode cannot repeat its last step.
        """
        raise StepOrderError("the episode cannot repeat its last step")

    def start_step(self, action: str) -> Future[Raw] | None:
        """Start a step and return the future of its answer, which the caller may cancel.

        This is faster than `step`, which needs a waiting asyncio task: the task takes most of the time of a remote
        step. If the step cannot be started in this way, return None; the caller then calls `step` instead. Raises the
        same errors as `step`.
        """
        return None

    def finish_step(self, answer: Future[Raw]) -> Step:
        """Return the result of a step that `start_step` started, after its future `answer` is done.

        Raises:
            SandboxLostError, UnreachableError: It is unknown whether the environment has played the step. Call `step`
                with the same action.
            EnvkitError: As for `step`.
        """
        raise StepOrderError("no step was started")


class EnvHost(Protocol):
    """Runs episodes, and leases them to callers. The episodes run in this process, on a server, or in sandboxes.

    Inherit from it to get the defaults.
    """

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

    @property
    def queued(self) -> int:
        """Number of leases that wait for a slot that others use, or for the host to be reachable."""
        return 0

    @property
    def why_unready(self) -> str:
        """Why no episode can start at present, in one line; empty if episodes can start."""
        return ""

    def partition_of(self, env_id: str, tenant: str) -> tuple[str, int]:
        """Return the name and the number of slots of the part of the host that plays an environment for a tenant.

        Errors use the name after "slots for", so it says whose slots these are, such as ``environments with tools``. It
        is empty if the host has only one part.

        Raises:
            EnvkitError: The host refuses new episodes of this environment.
        """
        return "", self.capacity

    def lease_as(self, key: TenantKey, task: Task) -> AbstractAsyncContextManager[Episode]:
        """Lease an episode as `lease` does, but if the host has an episode with this key and task, resume that one.

        Args:
            key: Key of the episode. Losses of sandboxes that the episode causes count against the key's tenant.
            task: Task of the episode.
        """
        return self.lease(task)

    def resumable_task(self, key: TenantKey) -> Task | None:
        """Return the task of the episode with this key; None if this host cannot resume an episode with this key."""
        return None

    def resumable_keys(self) -> Sequence[TenantKey]:
        """Return the keys of the episodes that this host can resume, such as those of an earlier server process."""
        return ()


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


@runtime_checkable
class NamedTaskSet(TaskSet, Protocol):
    """A task set whose tasks have names. Commands accept a name in place of the index in the split."""

    def names(self, split: str) -> Sequence[str]:
        """Return the names of the tasks of `split` in order; empty if there are arbitrarily many tasks."""
        ...


@runtime_checkable
class NotedTaskSet(TaskSet, Protocol):
    """A task set about which users should know something."""

    def notes(self) -> Sequence[str]:
        """Return lines for the result of an evaluation, such as one about tasks that cannot be read."""
        ...


class Judge(Protocol):
    """A language model that grades answers."""

    async def ask(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int = 512) -> str:
        """Return the model's answer to a chat, whose messages have a ``role`` and a ``content``.

        Raises:
            UnreachableError: The model's server gave no answer.
            TooLargeError: The model's server refuses the chat, for example because it exceeds the model's context.
        """
        ...
