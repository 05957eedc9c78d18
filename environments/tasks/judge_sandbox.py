"""The sandbox of a judge, which is replaced once if it is lost or does not start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from envkit.errors import (
    CapacityError,
    SandboxEndedError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
)
from envkit.protocols import Sandbox, SandboxPool
from envkit.types import Cause, SandboxSpec

from ..tools.limits import LEASE_S

ResultT = TypeVar("ResultT")

_ATTEMPTS = 2


async def in_fresh_sandbox(
    sandboxes: SandboxPool,
    spec: SandboxSpec,
    judge: Callable[[Sandbox], Awaitable[ResultT]],
    *,
    ended: Callable[[Cause], ResultT],
) -> ResultT:
    """Return the result of `judge` in a new sandbox.

    If what the agent submitted ends the sandbox, for example by using up its memory, the result is ``ended(cause)``. If
    the sandbox is lost or does not start for another reason, another one is tried.

    Args:
        sandboxes: Leases the sandboxes.
        spec: Spec of the sandboxes.
        judge: Called with the sandbox. It has a deadline for each command that it runs there.
        ended: Returns the result for a submission that ended the sandbox, such as a reward of 0.

    Raises:
        SandboxRefusedError, SandboxEndedError, ImpossibleSandboxError: No sandbox can have this spec.
        SandboxLostError, SandboxStartError, CapacityError: The last sandbox was lost or did not start, which says
            nothing about the submission. Raised by a grader, it voids the episode with its cause.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            async with sandboxes.lease(spec, wait_s=LEASE_S) as sandbox:
                return await judge(sandbox)
        except (SandboxRefusedError, SandboxEndedError):
            raise
        except (SandboxLostError, SandboxStartError, CapacityError) as error:
            if isinstance(error, SandboxLostError) and error.cause.by_agent:
                return ended(error.cause)
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError("unreachable")
