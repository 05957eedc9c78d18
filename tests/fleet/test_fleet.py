"""The fleet, with scripted workers on virtual time: nothing hangs when workers die."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.errors import RequestError, SandboxLostError, SandboxStartError
from envkit.fleet import FleetHost, WorkerStart
from envkit.http.api.session_operations import SessionOperations
from envkit.http.auth.caller import EVERYBODY
from envkit.http.protocol.messages import NoBody
from envkit.http.sessions.table import SessionTable
from envkit.restarts import RestartBudget
from envkit.sandbox.pool.health import LivenessTimes
from envkit.types import SandboxSpec, SandboxState
from tests.fleet.fleets import TASK, ScriptedPool, Worker, WorkerStarter, play, run, silent


def test_an_episode_goes_to_the_worker_with_the_fewest_episodes() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        async with starter.fleet(workers=3, slots_per_sandbox=4) as host, anyio.create_task_group() as tasks:
            ends: list[str] = []
            for _ in range(7):
                tasks.start_soon(play, host, 5, ends)
            await anyio.sleep(2)
            assert sorted(worker.playing for worker in starter.workers) == [2, 2, 3]
        assert sorted(ends) == ["worker-0"] * 3 + ["worker-1"] * 2 + ["worker-2"] * 2

    run(main)


def test_a_sandbox_of_a_tenant_never_becomes_a_worker() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        pool = ScriptedPool(starter.start)
        async with pool:
            for tenant in ("", "bob"):
                await pool.create(":envs-shared-1", SandboxSpec(), tenant=tenant)
            async with FleetHost(pool, WorkerStart(SandboxSpec(), pool.connect), workers=2, slots_per_sandbox=1):
                assert [(view.tenant, view.id == ":envs-shared-1") for view in pool.views()] == [
                    ("", True),
                    ("bob", True),
                    ("", False),
                ]
            assert [view.tenant for view in pool.views() if view.state is SandboxState.LEASED] == ["bob"]

    run(main)


def test_a_lease_waits_while_all_slots_are_taken() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        async with starter.fleet(workers=2, slots_per_sandbox=2) as host:
            assert host.capacity == 4
            ends: list[str] = []
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(play, host, 100, ends)
            assert clock.now() == pytest.approx(0.5 + 2 * 100)
        assert len(ends) == 8
        assert [worker.most_playing for worker in starter.workers] == [2, 2]

    run(main)


def test_a_lease_that_stops_waiting_leaves_its_slot_to_the_next() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        async with starter.fleet(workers=1, slots_per_sandbox=1) as host:
            ends: list[str] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play, host, 10, ends)
                await anyio.sleep(1)
                with anyio.move_on_after(5):
                    async with host.lease(TASK):
                        pytest.fail("there is no free slot")
                tasks.start_soon(play, host, 10, ends)
            assert ends == ["worker-0", "worker-0"]

    run(main)


def test_every_episode_of_a_worker_that_dies_raises_at_once_and_the_others_continue() -> None:
    async def main() -> None:
        starter = WorkerStarter(lambda name: Worker(name, step_s=50))
        ends: list[str] = []
        async with starter.fleet(workers=2, slots_per_sandbox=3) as host, anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(play, host, 100, ends)
            await anyio.sleep(10)
            starter.workers[0].die("killed by signal 9")
            await anyio.sleep(1)
            assert ends == ["10.5 killed by signal 9"] * 3
            assert host.lost == 1
        assert ends[3:] == ["worker-1"] * 3

    run(main)


def test_a_call_that_cannot_be_sent_raises_the_cause_of_the_loss() -> None:
    async def main() -> None:
        starter = WorkerStarter()

        async def die_later(worker: Worker) -> None:
            worker.knows_its_cause = False  # the connection breaks before the sandbox is seen to end
            worker.die("")

        async with starter.fleet(workers=1, slots_per_sandbox=1) as host, host.lease(TASK) as episode:
            await die_later(starter.workers[0])
            with pytest.raises(SandboxLostError, match="lost: unreachable: connection refused"):
                await episode.reset()
            assert clock.now() == pytest.approx(0.5 + 1.0)
            with pytest.raises(SandboxLostError, match="unreachable"):
                await episode.step("go")

    run(main)


def test_a_worker_that_stops_answering_is_detected_by_its_heartbeats_and_replaced() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        ends: list[str] = []
        liveness = LivenessTimes(interval_s=5, suspect_s=8, lost_s=17)
        async with starter.fleet(workers=1, slots_per_sandbox=1, liveness=liveness) as host:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play, host, 100, ends)
                await anyio.sleep(5.1)  # just after a heartbeat, the worst moment
                starter.workers[0].answers = False
            assert ends == ["22.5 env server did not answer for 17 s"]
            await play(host, 1, ends)
            assert ends[1:] == ["worker-1"]
            assert host.lost == 1

    run(main)


def test_a_late_heartbeat_does_not_count_as_missed() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        liveness = LivenessTimes(interval_s=5, suspect_s=8, lost_s=12)
        async with starter.fleet(workers=1, slots_per_sandbox=1, liveness=liveness) as host:
            for _ in range(4):
                await anyio.sleep(4.9)
                starter.workers[0].answers = False
                await anyio.sleep(2.2)
                starter.workers[0].answers = True
                await anyio.sleep(2.9)
            assert host.lost == 0

    run(main)


def test_leases_wait_for_the_replacement() -> None:
    async def main() -> None:
        starter = WorkerStarter(start_s=3)
        ends: list[str] = []
        async with starter.fleet(workers=1, slots_per_sandbox=1) as host:
            starter.workers[0].die("oom-killed")
            await anyio.sleep(0.01)
            await play(host, 1, ends)
            assert ends == ["worker-1"]
            assert clock.now() == pytest.approx(3 + 0.1 + 3 + 1)
            assert starter.workers[0].stopped_at == 3

    run(main)


def test_a_server_is_ready_only_while_a_shared_worker_is_healthy() -> None:
    async def main() -> None:
        starter = WorkerStarter(start_s=3)
        async with starter.fleet(workers=2, slots_per_sandbox=1) as host, SessionTable(host) as table:
            calls = SessionOperations(table, tuple)

            async def ready() -> tuple[bool, str]:
                answer = await calls.ready(NoBody(), EVERYBODY)
                return answer.ready, answer.why

            assert await ready() == (True, "")
            starter.workers[0].die("killed")
            await anyio.sleep(0.01)
            assert await ready() == (True, "")
            starter.workers[1].die("killed")
            await anyio.sleep(2)
            assert await ready() == (False, "no environment sandbox has been healthy for 2 s")
            await anyio.sleep(2)  # the workers are replaced although there is no lease
            assert await ready() == (True, "")

    run(main)


def test_restarts_back_off_until_the_budget_is_spent() -> None:
    async def main() -> None:
        starter = WorkerStarter(start_s=0)
        budget = RestartBudget(restarts=4, window_s=100, first_delay_s=1, longest_delay_s=3)
        async with starter.fleet(workers=1, slots_per_sandbox=2, restarts=budget, ends_when_spent=True) as host:
            for _ in range(5):
                starter.workers[-1].die("killed by signal 9")
                await anyio.sleep(10)
            assert starter.starts == [0, 1, 12, 23, 33]
            assert (host.lost, host.capacity) == (5, 0)
            with pytest.raises(SandboxStartError, match=r"restart budget spent \(4 in 100 s\).* lost: killed"):
                async with host.lease(TASK):
                    pytest.fail("no worker is left")

    run(main)


def test_waiting_leases_raise_when_the_last_worker_is_gone_for_good() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        ends: list[str] = []
        budget = RestartBudget(restarts=1)
        async with starter.fleet(1, 1, budget, ends_when_spent=True) as host, anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(play, host, 1000, ends)
            await anyio.sleep(5)
            starter.workers[0].die("out of memory")
            await anyio.sleep(5)
            starter.workers[1].die("out of memory")
        lost = ["5.5 out of memory", "10.5 out of memory"]
        assert ends[:2] == lost
        assert ends[2].startswith("10.5 no worker left; restart budget spent (1 in 600 s)")

    run(main)


class Foreign(Worker):
    """A server of another protocol."""

    async def health(self) -> None:
        raise RequestError("no such protocol")


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        (SandboxStartError("worker-x", "no such program"), "did not start: no such program"),
        (silent, r"did not start: env server did not answer within 10 s"),
        (Foreign, "env server error: no such protocol"),
    ],
)
def test_a_fleet_without_a_worker_that_starts_reports_the_cause_at_once(
    entry: Callable[[str], Worker] | Exception, cause: str
) -> None:
    async def main() -> None:
        starter = WorkerStarter(entry)
        with pytest.raises(SandboxStartError, match=cause):
            async with starter.fleet(workers=2, slots_per_sandbox=1):
                pytest.fail("there is no worker")
        assert len(starter.starts) == 2
        assert all(worker.stopped_at is not None for worker in starter.workers)

    run(main)


def test_each_missing_worker_counts_as_lost_or_as_a_failed_start() -> None:
    async def main() -> None:
        starter = WorkerStarter(Worker, SandboxStartError("worker-x", "no such program"), silent, Worker)
        async with starter.fleet(workers=1, slots_per_sandbox=1) as host:
            starter.workers[0].die("killed")
            await anyio.sleep(60)
            assert (len(starter.starts), host.lost, host.failed_starts) == (4, 1, 2)
        assert (host.lost, host.failed_starts) == (1, 2)  # the last one was only closed

    run(main)


def test_leaving_the_fleet_stops_the_workers_and_ends_their_episodes() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        ends: list[str] = []
        async with anyio.create_task_group() as tasks, starter.fleet(workers=2, slots_per_sandbox=1) as host:
            for _ in range(3):
                tasks.start_soon(play, host, 100, ends)
            await anyio.sleep(9.5)
        assert sorted(ends) == [
            "10 the fleet is closed",
            "10 the fleet was closed",
            "10 the fleet was closed",
        ]
        assert [worker.stopped_at for worker in starter.workers] == [10, 10]
        assert (host.lost, host.capacity) == (0, 0)

    run(main)


def test_a_cancelled_fleet_stops_its_workers_also_while_they_start() -> None:
    async def main() -> None:
        starter = WorkerStarter(Worker, silent)
        with anyio.move_on_after(3):
            async with starter.fleet(workers=2, slots_per_sandbox=1):
                pytest.fail("the second worker never answers")
        assert [worker.stopped_at for worker in starter.workers] == [3, 3]

    run(main)


def test_a_lease_holds_its_slot_until_it_ends_and_raises_the_callers_error() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        async with starter.fleet(workers=1, slots_per_sandbox=1) as host:
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    async with host.lease(TASK):
                        raise ZeroDivisionError
            assert (starter.workers[0].playing, starter.workers[0].most_playing) == (0, 1)

    run(main)
