"""The sandbox of a judge: what is the submission's fault, what is tried again, and what voids the episode."""

from __future__ import annotations

import pytest

from envkit import clock
from envkit.environments.tasks import in_fresh_sandbox
from envkit.errors import CapacityError, EnvkitError, SandboxLostError, SandboxRefusedError, SandboxStartError
from envkit.protocols import Sandbox
from envkit.types import ExecResult, SandboxSpec
from tests.environments.tools.pools import NODE_LOST, OUT_OF_MEMORY, pool_of
from tests.sandbox.fake.backend import Command, Fate


def works(command: Command) -> ExecResult:
    return ExecResult(0, b"42", duration_s=2)


WORKS = Fate(answer=works)
LOST = Fate(dies_after_s=1, cause=NODE_LOST, answer=works)
ENDED = Fate(dies_after_s=1, cause=OUT_OF_MEMORY, answer=works)
NOT_STARTED = Fate(start_failure="no room")


async def ask(sandbox: Sandbox) -> str:
    return (await sandbox.exec(["judge"])).stdout


def judged(*fates: Fate, memory_mib: int | None = None) -> tuple[str, int]:
    """Return the result of a judge in sandboxes with these fates, and the number of sandboxes."""

    async def main() -> tuple[str, int]:
        async with pool_of(*fates) as (pool, backend):
            result = await in_fresh_sandbox(
                pool, SandboxSpec(memory_mib=memory_mib), ask, ended=lambda cause: cause.detail
            )
            return result, len(backend.sandboxes)

    return clock.run(main, virtual=True)


def test_a_judge_has_a_sandbox_of_its_own() -> None:
    assert judged(WORKS) == ("42", 1)


def test_a_submission_that_ends_the_sandbox_has_its_result_at_the_first_attempt() -> None:
    assert judged(ENDED, WORKS) == (OUT_OF_MEMORY.detail, 1)


@pytest.mark.parametrize(("failure", "error"), [(LOST, SandboxLostError), (NOT_STARTED, SandboxStartError)])
def test_another_loss_is_tried_again_and_the_last_one_is_raised_with_its_cause(
    failure: Fate, error: type[EnvkitError]
) -> None:
    assert judged(failure, WORKS)[0] == "42"
    with pytest.raises(error, match=r"the node is gone|no room"):
        judged(failure, failure, WORKS)


def test_a_full_pool_is_an_error_after_ten_minutes_for_each_attempt() -> None:
    async def main() -> None:
        async with pool_of(WORKS) as (pool, _), pool.lease(SandboxSpec(memory_mib=4096)):
            began_s = clock.now()
            with pytest.raises(CapacityError):
                await in_fresh_sandbox(pool, SandboxSpec(), ask, ended=str)
            assert 1190 < clock.now() - began_s < 1210

    clock.run(main, virtual=True)


def test_a_spec_that_no_sandbox_can_have_is_an_error_at_once() -> None:
    with pytest.raises(SandboxRefusedError):
        judged(WORKS, memory_mib=-1)
