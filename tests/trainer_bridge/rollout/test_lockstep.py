"""Lockstep: all members continue at the same moment, and no wait is unbounded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio

from envkit import clock
from envkit.trainer_bridge.rollout import Lockstep


async def walk(lockstep: Lockstep, pauses: Sequence[float], passed: list[float], *, comes_s: float = 0.0) -> None:
    """Join the barrier, with a pause before each call of `together` and one of 2 s at the end."""
    await anyio.sleep(comes_s)
    lockstep.arrive()
    for pause in pauses:
        await anyio.sleep(pause)
        await lockstep.together()
        passed.append(clock.now())
    await anyio.sleep(2)
    lockstep.leave(arrived=True)


def test_lockstep_opens_when_the_last_one_comes_or_leaves() -> None:
    async def main() -> list[list[float]]:
        lockstep, passed = Lockstep(3, timeout_s=100, queued=lambda: 0), [list[float]() for _ in range(3)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(walk, lockstep, (1, 1, 1), passed[0])
            tasks.start_soon(walk, lockstep, (5, 1), passed[1])
            tasks.start_soon(walk, lockstep, (3,), passed[2])
        return passed

    # All at 5. The third leaves at 7, which lets the others go on; the second leaves at 9.
    assert clock.run(main, virtual=True) == [[5, 7, 9], [5, 7], [5]]


def test_lockstep_does_not_wait_for_one_that_was_cancelled_in_it() -> None:
    async def main() -> float:
        lockstep = Lockstep(2, timeout_s=100, queued=lambda: 0)

        async def unenforced() -> None:
            lockstep.arrive()
            try:
                with anyio.move_on_after(4):
                    await lockstep.together()
            finally:
                lockstep.leave(arrived=True)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(unenforced)
            lockstep.arrive()
            await anyio.sleep(6)
            await lockstep.together()
        return clock.now()

    assert clock.run(main, virtual=True) == 6.0


def test_lockstep_waits_only_so_long_for_those_that_have_not_come() -> None:
    async def main() -> list[list[float]]:
        lockstep, passed = Lockstep(3, timeout_s=10, queued=lambda: 0), [list[float]() for _ in range(3)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(walk, lockstep, (1, 20, 1, 1), passed[0])
            tasks.start_soon(walk, lockstep, (4, 1, 1), passed[1])
            tasks.start_soon(partial(walk, comes_s=25), lockstep, (1, 5), passed[2])
        return passed

    # The first waits from 1 to 11 and is not asked to again; who comes at 25 takes part from then on.
    assert clock.run(main, virtual=True) == [[11, 31, 36, 38], [11, 31, 36], [31, 36]]


def test_lockstep_does_not_wait_for_queued_episodes_until_they_have_a_slot() -> None:
    async def main() -> list[list[float]]:
        passed = [list[float]() for _ in range(3)]
        # The third episode is queued until 8 s, and arrives at 10 s.
        lockstep = Lockstep(3, timeout_s=100, queued=lambda: clock.now() < 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(walk, lockstep, (1, 1, 7), passed[0])
            tasks.start_soon(walk, lockstep, (2, 1, 7), passed[1])
            tasks.start_soon(partial(walk, comes_s=10), lockstep, (1,), passed[2])
        return passed

    # The first two pass at 2 s and 3 s without the third. From 8 s on they wait for it, and at 11 s all pass.
    assert clock.run(main, virtual=True) == [[2, 3, 11], [2, 3, 11], [11]]
