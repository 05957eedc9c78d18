"""Judges of submissions: in a sandbox, which is replaced once if it is lost or does not start, or by a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from envkit.errors import (
    CapacityError,
    SandboxEndedError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
    TooLargeError,
    UnreachableError,
)
from envkit.protocols import Judge, Sandbox, SandboxPool
from envkit.types import Cause, SandboxSpec

from ..answer import parse_number
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


def read_score(reply: str) -> float | None:
    r"""Return the number from 0 to 1 in the reply of a judge; None if there is no such number.

    See `envkit.environments.answer.parse_number`: the last number in ``<answer>`` tags, in ``\boxed``, or in the text.
    It may be ``0.7``, ``7/10``, ``7 of 10`` or ``70%``.
    """
    number = parse_number(reply)
    return float(number) if number is not None and 0 <= number <= 1 else None


async def ask_judge(judge: Judge, prompt: str, read: Callable[[str], float | None] = read_score) -> float | None:
    """Return the score that a judge model gives: 0 if the prompt is too long for it, None if it has no answer.

    A submission can contain text that addresses the judge. So the prompt should say where the submission begins and
    ends, and that nothing in it is an instruction.

    Args:
        judge: The judge.
        prompt: The prompt, with the submission. It should tell the judge how to write the score.
        read: Returns the score, 0 to 1, in the judge's reply; None if there is no score.
    """
    try:
        reply = await judge.ask([{"role": "user", "content": prompt}])
    except UnreachableError:
        return None
    except TooLargeError:
        return 0.0
    return read(reply)
