"""The fleet, with scripted boxes on virtual time: nothing hangs, whatever dies."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.errors import RequestError, SandboxLostError, SandboxStartError
from envkit.fleet import HeartbeatTimes, RoutedHosts
from envkit.fleet.env_worker import WorkerEvent, after
from envkit.http.api.operations import Operations
from envkit.http.protocol.messages import NoBody
from envkit.http.sessions.table import SessionTable
from envkit.restarts import RestartBudget
from envkit.types import SandboxState
from tests.fleet.fleets import TASK, Box, Yard, play, run, silent


def test_an_episode_goes_to_the_box_with_the_fewest() -> None:
    async def main() -> None:
        yard = Yard()
        async with yard.fleet(boxes=3, slots_per_sandbox=4) as host, anyio.create_task_group() as tasks:
            ends: list[str] = []
            for _ in range(7):
                tasks.start_soon(play, host, 5, ends)
            await anyio.sleep(2)
            assert sorted(box.playing for box in yard.boxes) == [2, 2, 3]
        assert sorted(ends) == ["box-0"] * 3 + ["box-1"] * 2 + ["box-2"] * 2

    run(main)


def test_a_lease_waits_for_its_turn_while_all_places_are_taken() -> None:
    async def main() -> None:
        yard = Yard()
        async with yard.fleet(boxes=2, slots_per_sandbox=2) as host:
            assert host.capacity == 4
            ends: list[str] = []
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(play, host, 100, ends)
            assert clock.now() == pytest.approx(0.5 + 2 * 100)
        assert len(ends) == 8
        assert [box.most_playing for box in yard.boxes] == [2, 2]

    run(main)


def test_a_lease_that_gives_up_waiting_leaves_its_place_to_the_next() -> None:
    async def main() -> None:
        yard = Yard()
        async with yard.fleet(boxes=1, slots_per_sandbox=1) as host:
            ends: list[str] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play, host, 10, ends)
                await anyio.sleep(1)
                with anyio.move_on_after(5):
                    async with host.lease(TASK):
                        pytest.fail("there is no place")
                tasks.start_soon(play, host, 10, ends)
            assert ends == ["box-0", "box-0"]

    run(main)


def test_every_episode_of_a_box_that_dies_raises_at_once_and_the_others_play_on() -> None:
    async def main() -> None:
        yard = Yard(lambda name: Box(name, step_s=50))
        ends: list[str] = []
        async with yard.fleet(boxes=2, slots_per_sandbox=3) as host, anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(play, host, 100, ends)
            await anyio.sleep(10)
            yard.boxes[0].die("killed by signal 9")
            await anyio.sleep(1)
            assert ends == ["10.5 sandbox box-0 lost: killed by signal 9"] * 3
            assert host.lost == 1
        assert ends[3:] == ["box-1"] * 3

    run(main)


def test_a_call_that_does_not_get_through_raises_what_the_sandbox_died_of() -> None:
    async def main() -> None:
        yard = Yard()

        async def die_later(box: Box) -> None:
            box.knows_its_cause = False  # the connection breaks before the sandbox is seen to end
            box.die("")

        async with yard.fleet(boxes=1, slots_per_sandbox=1) as host, host.lease(TASK) as episode:
            await die_later(yard.boxes[0])
            with pytest.raises(SandboxLostError, match="box-0 lost: unreachable: connection refused"):
                await episode.reset()
            assert clock.now() == pytest.approx(0.5 + 1.0)
            with pytest.raises(SandboxLostError, match="cannot be reached"):
                await episode.step("go")

    run(main)


def test_a_box_that_is_stopped_is_noticed_after_its_probes_and_replaced() -> None:
    async def main() -> None:
        yard = Yard()
        ends: list[str] = []
        probing = HeartbeatTimes(interval_s=5, timeout_s=2, misses=3)
        async with yard.fleet(boxes=1, slots_per_sandbox=1, probing=probing) as host:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play, host, 100, ends)
                await anyio.sleep(5.1)  # just after a probe, the worst moment
                yard.boxes[0].answers = False
            assert ends == ["22.5 sandbox box-0 lost: env server did not answer for 17 s"]
            await play(host, 1, ends)
            assert ends[1:] == ["box-1"]
            assert (host.lost, host.restarts) == (1, 1)

    run(main)


def test_a_late_answer_is_an_answer() -> None:
    async def main() -> None:
        yard = Yard()
        async with yard.fleet(
            boxes=1, slots_per_sandbox=1, probing=HeartbeatTimes(interval_s=5, timeout_s=2, misses=2)
        ) as host:
            for _ in range(4):
                await anyio.sleep(4.9)
                yard.boxes[0].answers = False
                await anyio.sleep(2.2)
                yard.boxes[0].answers = True
                await anyio.sleep(2.9)
            assert host.lost == 0

    run(main)


def test_leases_wait_for_the_replacement() -> None:
    async def main() -> None:
        yard = Yard(start_s=3)
        ends: list[str] = []
        async with yard.fleet(boxes=1, slots_per_sandbox=1) as host:
            yard.boxes[0].die("oom-killed")
            await anyio.sleep(0.01)
            await play(host, 1, ends)
            assert ends == ["box-1"]
            assert clock.now() == pytest.approx(3 + 0.1 + 3 + 1)
            assert yard.boxes[0].stopped_at == 3

    run(main)


def test_a_server_is_ready_only_while_a_box_of_environments_is_healthy() -> None:
    async def main() -> None:
        yard = Yard(start_s=3)
        async with yard.fleet(boxes=2, slots_per_sandbox=1) as host, SessionTable(host) as table:
            calls = Operations(table, tuple)

            async def ready() -> tuple[bool, str]:
                answer = await calls.ready(NoBody())
                return answer.ready, answer.why

            assert await ready() == (True, "")
            yard.boxes[0].die("killed")
            await anyio.sleep(0.01)
            assert await ready() == (True, "")
            yard.boxes[1].die("killed")
            await anyio.sleep(2)
            assert await ready() == (False, "no environment sandbox has been healthy for 2 s")
            await anyio.sleep(2)  # nobody asks for an episode, and yet the boxes are replaced
            assert await ready() == (True, "")

    run(main)


def test_worlds_with_boxes_of_their_own_do_not_make_a_server_ready() -> None:
    async def main() -> None:
        shared, own = Yard(start_s=3), Yard()
        async with shared.fleet(boxes=1, slots_per_sandbox=1) as many, own.fleet(boxes=1, slots_per_sandbox=1) as one:
            homes = RoutedHosts(many, one, lambda env_id: True)
            assert homes.why_unready == ""
            own.boxes[0].die("it has served its episodes")
            await anyio.sleep(0.01)
            assert homes.why_unready == ""
            shared.boxes[0].die("killed")
            await anyio.sleep(1)
            assert homes.why_unready == "no environment sandbox has been healthy for 1 s"

    run(main)


def test_replacements_wait_longer_each_time_until_the_budget_is_spent() -> None:
    async def main() -> None:
        yard = Yard(start_s=0)
        budget = RestartBudget(restarts=4, window_s=100, first_delay_s=1, longest_delay_s=3)
        async with yard.fleet(boxes=1, slots_per_sandbox=2, restarts=budget, unenforced=True) as host:
            for _ in range(5):
                yard.boxes[-1].die("killed by signal 9")
                await anyio.sleep(10)
            assert yard.starts == [0, 1, 12, 23, 33]
            assert (host.lost, host.restarts, host.capacity) == (5, 4, 0)
            with pytest.raises(SandboxStartError, match=r"restart budget spent \(4 in 100 s\).* box-4 lost: killed"):
                async with host.lease(TASK):
                    pytest.fail("no box is left")

    run(main)


def test_who_waits_is_told_when_the_last_box_is_gone_for_good() -> None:
    async def main() -> None:
        yard = Yard()
        ends: list[str] = []
        budget = RestartBudget(restarts=1)
        async with yard.fleet(1, 1, budget, unenforced=True) as host, anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(play, host, 1000, ends)
            await anyio.sleep(5)
            yard.boxes[0].die("out of memory")
            await anyio.sleep(5)
            yard.boxes[1].die("out of memory")
        lost = ["5.5 sandbox box-0 lost: out of memory", "10.5 sandbox box-1 lost: out of memory"]
        assert ends[:2] == lost
        assert ends[2].startswith("10.5 sandbox fleet did not start: no worker left; restart budget spent (1 in 600 s)")

    run(main)


def test_a_fleet_goes_on_with_the_boxes_that_are_left() -> None:
    async def main() -> None:
        yard = Yard()
        ends: list[str] = []
        async with yard.fleet(2, 1, RestartBudget(restarts=1), unenforced=True) as host:
            for box in (0, 1):
                yard.boxes[box].die("killed")
            await anyio.sleep(5)
            assert host.capacity == 1
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(play, host, 1, ends)
        assert ends == ["box-2", "box-2"]

    run(main)


def test_leases_do_not_wait_for_ever_for_a_box_that_never_answers() -> None:
    async def main() -> None:
        yard = Yard(Box, silent)
        async with yard.fleet(boxes=1, slots_per_sandbox=1, restarts=RestartBudget(restarts=100)) as host:
            yard.boxes[0].die("killed")
            await anyio.sleep(1)
            with pytest.raises(SandboxStartError, match=r"for 30 s; last: sandbox box-\d did not .* within 10 s"):
                async with host.lease(TASK):
                    pytest.fail("no box is healthy")
            assert clock.now() == pytest.approx(0.5 + 30)

    run(main)


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        (SandboxStartError("box-x", "no such program"), "box-x did not start: no such program"),
        (silent, r"box-\d did not start: env server did not answer within 10 s"),
    ],
)
def test_a_fleet_of_which_no_box_comes_up_says_why_at_once(entry: Callable[[str], Box] | Exception, cause: str) -> None:
    async def main() -> None:
        yard = Yard(entry)
        with pytest.raises(SandboxStartError, match=cause):
            async with yard.fleet(boxes=2, slots_per_sandbox=1):
                pytest.fail("there is no box")
        assert len(yard.starts) == 2
        assert all(box.stopped_at is not None for box in yard.boxes)

    run(main)


def test_a_box_that_dies_before_its_server_answers_did_not_start() -> None:
    async def main() -> None:
        def stillborn(name: str) -> Box:
            box = Box(name)
            box.die("exited with code 1: ImportError: no gymnasium")
            return box

        yard = Yard(Box, stillborn, Box)
        async with yard.fleet(boxes=2, slots_per_sandbox=1) as host:
            await anyio.sleep(5)
            assert (host.lost, host.failed_starts, host.restarts) == (0, 1, 1)
            assert [box.id for box in yard.boxes if not box.died.is_set()] == ["box-0", "box-2"]

    run(main)


def test_what_was_lost_and_what_did_not_start_are_together_all_boxes_that_are_not_there() -> None:
    async def main() -> None:
        yard = Yard(Box, SandboxStartError("box-x", "no such program"), silent, Box)
        async with yard.fleet(boxes=1, slots_per_sandbox=1) as host:
            yard.boxes[0].die("killed")
            await anyio.sleep(60)
            assert (len(yard.starts), host.lost, host.failed_starts) == (4, 1, 2)
        assert (host.lost, host.failed_starts) == (1, 2)  # the last one was only closed

    run(main)


def test_a_server_that_refuses_the_client_counts_as_failed_not_as_slow() -> None:
    async def main() -> None:
        class Foreign(Box):
            async def health(self) -> None:
                raise RequestError("no such protocol")

        with pytest.raises(SandboxStartError, match="env server error: no such protocol"):
            async with Yard(Foreign).fleet(boxes=1, slots_per_sandbox=1):
                pytest.fail("there is no box")
        assert clock.now() == 0.5

    run(main)


def test_leaving_the_fleet_stops_the_boxes_and_ends_what_plays_there() -> None:
    async def main() -> None:
        yard = Yard()
        ends: list[str] = []
        async with anyio.create_task_group() as tasks, yard.fleet(boxes=2, slots_per_sandbox=1) as host:
            for _ in range(3):
                tasks.start_soon(play, host, 100, ends)
            await anyio.sleep(9.5)
        assert sorted(ends) == [
            "10 sandbox box-0 lost: the fleet was closed",
            "10 sandbox box-1 lost: the fleet was closed",
            "10 sandbox fleet did not start: the fleet is closed",
        ]
        assert [box.stopped_at for box in yard.boxes] == [10, 10]
        assert (host.lost, host.capacity) == (0, 0)

    run(main)


def test_an_error_in_the_block_leaves_the_fleet_as_it_is() -> None:
    async def main() -> None:
        yard = Yard()
        with pytest.raises(ZeroDivisionError):
            async with yard.fleet(boxes=1, slots_per_sandbox=1):
                raise ZeroDivisionError
        assert yard.boxes[0].stopped_at == 0.5

    run(main)


def test_a_cancelled_fleet_stops_its_boxes_also_while_they_start() -> None:
    async def main() -> None:
        yard = Yard(Box, silent)
        with anyio.move_on_after(3):
            async with yard.fleet(boxes=2, slots_per_sandbox=1):
                pytest.fail("the second box never answers")
        assert [box.stopped_at for box in yard.boxes] == [3, 3]

    run(main)


def test_an_episode_that_was_finished_when_its_box_died_stays_finished() -> None:
    async def main() -> None:
        yard = Yard()
        async with yard.fleet(boxes=1, slots_per_sandbox=1) as host:
            async with host.lease(TASK) as episode:
                await episode.reset()
                step = await episode.step("go")
                yard.boxes[0].die("killed")
            assert step.observation.text == "box-0 go"

    run(main)


def test_a_lease_has_its_place_until_it_ends_and_the_callers_error_comes_out() -> None:
    async def main() -> None:
        yard = Yard()
        async with yard.fleet(boxes=1, slots_per_sandbox=1) as host:
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    async with host.lease(TASK):
                        raise ZeroDivisionError
            assert (yard.boxes[0].playing, yard.boxes[0].most_playing) == (0, 1)

    run(main)


def test_only_a_box_that_was_ready_can_be_lost() -> None:
    assert after(SandboxState.STARTING, WorkerEvent.GONE) is SandboxState.STOPPED
    assert after(SandboxState.READY, WorkerEvent.GONE) is SandboxState.LOST
    assert after(SandboxState.LOST, WorkerEvent.CLOSED) is SandboxState.LOST


def test_a_box_that_is_gone_does_not_come_back() -> None:
    with pytest.raises(ValueError, match="invalid event answered for a worker that is lost"):
        after(SandboxState.LOST, WorkerEvent.ANSWERED)
