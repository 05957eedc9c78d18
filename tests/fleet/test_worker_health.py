"""Heartbeats of env servers: a busy one is healthy, a hung one is lost; our event-loop lag does not count."""

from __future__ import annotations

import threading

import anyio

from envkit import clock
from envkit.sandbox.pool.health import LivenessTimes
from tests.fleet.fleets import Worker, WorkerStarter, play, run

PROBING = LivenessTimes(interval_s=1, suspect_s=2, lost_s=4)


async def compute(worker: Worker, seconds: float) -> None:
    """Block a worker's server for a while, as an environment that computes does."""
    worker.answers, worker.hogs = False, True
    await anyio.sleep(seconds)
    worker.answers, worker.hogs = True, False


def test_a_server_that_computes_for_long_is_not_lost_and_its_episodes_continue() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        ends: list[str] = []
        async with starter.fleet(1, 3, liveness=PROBING) as host, anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(play, host, 400, ends)
            await anyio.sleep(5.1)
            await compute(starter.workers[0], 299)
            await anyio.sleep(200)
            assert (ends, host.lost) == (["worker-0"] * 3, 0)

    run(main)


def test_a_server_that_computes_longer_than_the_step_limit_is_lost_before_its_calls_time_out() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        ends: list[str] = []
        async with starter.fleet(1, 1, liveness=PROBING) as host, anyio.create_task_group() as tasks:
            tasks.start_soon(play, host, 1000, ends)
            await anyio.sleep(5.1)
            with anyio.move_on_after(600):
                await compute(starter.workers[0], 1000)
        what = "env server computed for 300 s, the limit for one step"
        assert ends == [f"305.5 {what}"]

    run(main)


def test_a_server_that_hangs_after_it_computed_is_lost_in_time() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        async with starter.fleet(1, 1, liveness=PROBING) as host:
            await anyio.sleep(5.1)
            starter.workers[0].answers = False
            await anyio.sleep(4.5)
            assert host.lost == 1
            await anyio.sleep(10)
            with anyio.move_on_after(100):
                await compute(starter.workers[1], 1000)
            assert host.lost == 1
            starter.workers[1].hogs = False
            await anyio.sleep(5)
            assert host.lost == 2

    run(main)


def test_a_new_episode_goes_to_a_worker_that_answers_rather_than_one_that_computes() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        async with starter.fleet(2, 2, liveness=PROBING) as host, anyio.create_task_group() as tasks:
            tasks.start_soon(compute, starter.workers[0], 100)
            await anyio.sleep(4)
            for _ in range(2):
                ends: list[str] = []
                tasks.start_soon(play, host, 10, ends)
            await anyio.sleep(20)
            assert [worker.most_playing for worker in starter.workers] == [0, 2]
            tasks.cancel_scope.cancel()

    run(main)


def test_our_own_event_loop_lag_does_not_count_as_a_missed_heartbeat() -> None:
    async def main() -> None:
        async with WorkerStarter(start_s=0).fleet(5, 1, liveness=LivenessTimes(0.1, 0.2, 0.6)) as host:
            for _ in range(3):
                await anyio.sleep(0.1)
                threading.Event().wait(1)  # block the event loop
            await anyio.sleep(0.3)
            assert host.lost == 0

    clock.run(main)
