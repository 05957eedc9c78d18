"""Places of a fleet whose boxes die again and again, find no room, or cannot be stopped: they are filled again."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from envkit import clock
from envkit.errors import CapacityError, EnvkitError, SandboxError, SandboxStartError
from envkit.fleet import FleetHost
from envkit.fleet.session_store import SessionRecord, SessionStore
from envkit.restarts import RestartBudget
from envkit.types import Task
from tests.fleet.fleets import TASK, Box, Yard, connect, play, run

NO_ROOM = CapacityError("the pool has no nodes")


class Book:
    """Seats in memory, of which nothing can be written down while it is full."""

    def __init__(self, **seats: SessionRecord) -> None:
        self.seats = seats
        self.is_full = False

    def keys(self) -> Sequence[str]:
        return list(self.seats)

    def get(self, key: str) -> SessionRecord | None:
        return self.seats.get(key)

    async def record(self, key: str, record: SessionRecord) -> None:
        self._write()
        self.seats[key] = record

    async def forget(self, *keys: str) -> None:
        self._write()
        for key in keys:
            self.seats.pop(key, None)

    def _write(self) -> None:
        if self.is_full:
            raise EnvkitError("the disk is full")


def with_seats(
    yard: Yard, seats: SessionStore, *, slots_per_sandbox: int = 2, episodes_per_sandbox: int | None = None
) -> FleetHost:
    return FleetHost(
        yard.start,
        connect,
        workers=1,
        slots_per_sandbox=slots_per_sandbox,
        episodes_per_sandbox=episodes_per_sandbox,
        seats=seats,
    )


def test_a_place_whose_budget_is_spent_is_filled_again_when_the_oldest_failure_leaves_the_window() -> None:
    async def main() -> None:
        yard, said = Yard(start_s=0), list[str]()
        budget = RestartBudget(restarts=2, window_s=100, first_delay_s=1)
        async with yard.fleet(1, 2, budget, alert=said.append) as host:
            for _ in range(3):
                yard.boxes[-1].die("killed by signal 9")
                await anyio.sleep(10)
            assert (yard.starts, host.waiting, host.capacity) == ([0, 1, 12], 1, 2)
            spent = "restart budget spent (2 in 100 s); next restart in 80 s"
            assert said == [f"environment workers: {spent}; last: sandbox box-2 lost: killed by signal 9"]
            with pytest.raises(SandboxStartError, match=r"no healthy worker for 30 s; last: .* killed by signal 9"):
                async with host.lease(TASK):
                    pytest.fail("there is no box")
            assert clock.now() == 50
            await anyio.sleep(51)
            assert (yard.starts[3:], host.waiting) == ([100], 0)
            ends: list[str] = []
            await play(host, 1, ends)
            assert ends == ["box-3"]

    run(main)


def test_the_boxes_of_a_server_that_are_lost_all_at_once_are_all_replaced_at_once() -> None:
    async def main() -> None:
        yard = Yard()
        async with yard.fleet(8, 1, RestartBudget(restarts=1)) as host:
            for box in list(yard.boxes):
                box.die("the node was lost")
            await anyio.sleep(1)
            assert (len(yard.boxes), host.restarts, host.waiting) == (16, 8, 0)

    run(main)


def test_that_there_is_no_room_is_waited_for_and_uses_up_no_budget() -> None:
    async def main() -> None:
        yard = Yard(Box, *[NO_ROOM] * 50, Box)
        async with yard.fleet(1, 1, RestartBudget(restarts=1)) as host:
            yard.boxes[0].die("the node was lost")
            await anyio.sleep(40)
            with pytest.raises(SandboxStartError, match=r"last: .* the pool has no nodes"):
                async with host.lease(TASK):
                    pytest.fail("there is no box")
            await anyio.sleep(60)
            ends: list[str] = []
            await play(host, 1, ends)
            assert (ends, host.waiting) == (["box-1"], 0)

    run(main)


def test_one_box_that_cannot_be_stopped_is_not_the_end_of_the_others() -> None:
    class Sticky(Box):
        async def stop(self) -> None:
            self.die("stopped")
            raise SandboxError("it could not be ended within 10 s")

    async def main() -> None:
        yard = Yard(Sticky, Box)
        ends: list[str] = []
        async with yard.fleet(2, 1) as host, anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(play, host, 20, ends)
            await anyio.sleep(1)
            yard.boxes[0].die("killed")
        assert sorted(ends) == ["1.5 sandbox box-0 lost: killed", "box-1"]

    run(main)


def test_a_seat_that_cannot_be_written_down_takes_no_place() -> None:
    async def main() -> None:
        book = Book()
        async with with_seats(Yard(), book) as host:
            book.is_full = True
            for number in range(5):
                with pytest.raises(EnvkitError, match="the disk is full"):
                    async with host.lease_as(f"key {number}", TASK):
                        pytest.fail("it is not written down")
            book.is_full = False
            async with host.lease_as("a", TASK), host.lease_as("b", TASK):
                assert host.capacity == 2
            async with host.lease_as("c", TASK):
                book.is_full = True
                await anyio.sleep(1)
                book.is_full = False

    run(main)


def test_a_place_is_free_again_although_its_leaving_could_not_be_written_down() -> None:
    async def main() -> None:
        book = Book()
        async with with_seats(Yard(), book, slots_per_sandbox=1) as host:
            with pytest.raises(EnvkitError, match="the disk is full"):
                async with host.lease_as("a", TASK):
                    book.is_full = True
            book.is_full = False
            with anyio.fail_after(1):
                async with host.lease_as("b", TASK) as episode:
                    await episode.reset()

    run(main)


def test_a_box_of_its_own_is_replaced_also_when_an_episode_was_recalled_after_it_was_given_away() -> None:
    async def main() -> None:
        yard, task = Yard(), Task("Own-v0", 1)
        book = Book(old=SessionRecord("box-0", "session", task))
        async with with_seats(yard, book, slots_per_sandbox=1, episodes_per_sandbox=1) as host:
            async with host.lease_as("new", TASK), host.lease_as("old", task):
                pass
            await anyio.sleep(2)
            ends: list[str] = []
            await play(host, 1, ends)
            assert ends == ["box-1"]

    run(main)
