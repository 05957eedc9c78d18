"""How boxes end: everybody is told why, and everything is given back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.errors import (
    DeadlineError,
    SandboxEndedError,
    SandboxError,
    SandboxLostError,
    UnreachableError,
)
from envkit.sandbox.host.instances import LiveSandboxes, not_ready
from envkit.types import CauseKind
from tests.causes import cause
from tests.sandbox.agent_client.peer import HELLO, run
from tests.sandbox.box_case import Case, answered


def test_a_box_that_dies_tells_every_caller_why_and_is_given_back_without_being_stopped() -> None:
    async def main() -> None:
        case = await Case().started()
        case.cause, case.cause_s = "out of memory", 0.5
        causes = []

        async def ask(call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(SandboxLostError) as caught:
                await call()
            causes.append((caught.value.sandbox_id, str(caught.value.cause), clock.now()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, lambda: case.box.exec(["x"], timeout_s=100))
            tasks.start_soon(ask, lambda: case.box.shell().run("x", timeout_s=100))
            tasks.start_soon(ask, lambda: case.box.read("x"))
            for _ in range(3):
                await case.peer.heard()
            case.peer.say_bytes(b"")
            assert str(await case.box.wait()) == "out of memory"
        assert causes == [("case-1", "out of memory", 0.5)] * 3
        assert case.done == ["asked", "killed", "forgotten"]
        for late in (case.box.probe(1), case.box.connect("x"), case.box.snapshot(), case.box.log()):
            with pytest.raises(SandboxLostError, match="case-1 lost: out of memory"):
                await late
        await case.box.stop()
        assert str(await case.box.wait()) == "out of memory"
        assert case.done == ["asked", "killed", "forgotten"]

    run(main)


@pytest.mark.parametrize(
    ("found", "farewell", "expected"),
    [
        (CauseKind.EXITED, "out_of_memory", (CauseKind.OUT_OF_MEMORY, True)),
        (CauseKind.EXITED, "exited", (CauseKind.EXITED, True)),
        (CauseKind.EXITED, "expired", (CauseKind.EXPIRED, False)),
        (CauseKind.EXITED, "orphaned", (CauseKind.ORPHANED, False)),
        (CauseKind.EXITED, None, (CauseKind.EXITED, False)),
        (CauseKind.KILLED, "exited", (CauseKind.KILLED, False)),
        (CauseKind.BACKEND_LOST, "out_of_memory", (CauseKind.OUT_OF_MEMORY, True)),
        (CauseKind.BACKEND_LOST, "exited", (CauseKind.BACKEND_LOST, False)),
        (CauseKind.OUT_OF_MEMORY, "exited", (CauseKind.OUT_OF_MEMORY, False)),
    ],
)
def test_where_process_1_exited_or_is_removed_its_agent_is_believed_why(
    found: CauseKind, farewell: str | None, expected: tuple[CauseKind, bool]
) -> None:
    async def main() -> None:
        case = await Case().started()
        case.cause = cause("it ended", found)
        if farewell is not None:
            case.peer.say({"ending": farewell})
        case.peer.say_bytes(b"")
        ended = await case.box.wait()
        assert (ended.kind, ended.by_agent) == expected

    run(main)


@pytest.mark.parametrize("by_agent", [False, True])
def test_a_start_that_ran_out_of_memory_ended_by_itself_only_at_the_sandbox_s_own_limit(by_agent: bool) -> None:
    error = not_ready("case-1", cause("out of memory", CauseKind.OUT_OF_MEMORY, by_agent=by_agent))
    assert isinstance(error, SandboxEndedError) == by_agent


@pytest.mark.parametrize(
    ("farewell", "detail"),
    [
        ("stopped", "its connection was closed"),
        ("expired", "time to live exceeded"),
        ("orphaned", "no client connected for orphan_ttl_s"),
        ("out_of_memory", "out of memory"),
        ("exited", "exited with code 3: no luck"),
    ],
)
def test_a_farewell_of_the_agent_is_described_by_its_kind_and_not_by_an_exit_code(farewell: str, detail: str) -> None:
    async def main() -> None:
        case = await Case().started()
        case.cause = cause("exited with code 3: no luck", CauseKind.EXITED)
        case.peer.say({"ending": farewell})
        case.peer.say_bytes(b"")
        assert (await case.box.wait()).detail == detail

    run(main)


def test_a_backend_is_told_which_oom_kills_the_sandbox_survived() -> None:
    async def main() -> None:
        case = await Case().started()
        case.peer.say({"oom_kills": 1})
        case.peer.say({"oom_kills": 3})
        case.peer.say_bytes(b"")
        await case.box.wait()
        assert case.survived is not None
        assert case.survived.oom_kills == 3

    run(main)


def test_a_cause_that_is_not_found_does_not_hold_anybody_up() -> None:
    async def main() -> None:
        case = await Case().started()
        case.cause_s = 1000
        case.peer.say_bytes(b"")
        assert str(await case.box.wait()) == "it has ended"
        assert clock.now() == 3
        other = await Case().started()
        other.cause = SandboxError("the daemon does not answer")
        other.peer.say_bytes(b"")
        assert str(await other.box.wait()) == "it has ended"
        await other.box.stop()
        assert other.done == ["asked", "killed", "forgotten"]
        faulty = await Case().started()
        faulty.cause = KeyError("State")
        faulty.peer.say_bytes(b"")
        assert str(await faulty.box.wait()) == "it has ended; finding the cause failed: KeyError('State')"
        await faulty.box.stop()
        assert faulty.done == ["asked", "killed", "forgotten"]

    run(main)


def test_a_box_that_breaks_the_rules_is_killed_and_the_rule_is_the_cause() -> None:
    async def main() -> None:
        case = await Case().started()
        case.peer.say({"id": 99, "end": True})
        assert str(await case.box.wait()) == "broken frame: a reply to an unknown call"
        await case.box.stop()
        assert case.done == ["killed", "forgotten"]

    run(main)


def test_an_agent_that_does_not_answer_loses_its_box_its_life() -> None:
    async def main() -> None:
        case = await Case().started()
        with pytest.raises(SandboxLostError, match="it does not answer"):
            await case.box.exec(["x"], timeout_s=20)
        assert clock.now() == 30.5
        await case.box.stop()
        assert case.done == ["killed", "forgotten"]

    run(main)


def test_a_probe_that_is_not_answered_costs_the_box_nothing() -> None:
    async def main() -> None:
        case = await Case().started()
        with pytest.raises(DeadlineError, match=r"case-1 did not answer within 0.5 s"):
            await case.box.probe(0.5)
        assert (clock.now(), case.done) == (0.5, [])
        for header in [(await case.peer.heard())[0] for _ in range(2)]:
            if "do" in header:
                case.peer.say({"id": header["id"], "end": True})
        took = await answered(case, case.box.probe(5), end=True)
        assert took == 0
        await case.box.stop()

    run(main)


def test_everybody_who_stops_waits_until_it_is_gone_and_it_is_killed_once() -> None:
    async def main() -> None:
        case = await Case().started()
        case.kill_s = 2

        async def work() -> None:
            with pytest.raises(SandboxLostError, match="lost: stopped"):
                await case.box.exec(["x"], timeout_s=100)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await case.peer.heard()
            tasks.start_soon(case.box.stop)
            tasks.start_soon(case.box.stop)
            with anyio.move_on_after(1) as limit:
                await case.box.stop()
            assert (clock.now(), limit.cancelled_caught) == (2, False)
        await case.box.stop()
        assert (clock.now(), case.done) == (2, ["killed", "forgotten"])
        assert str(await case.box.wait()) == "stopped"

    run(main)


def test_a_kill_that_fails_or_hangs_is_told_to_who_stops() -> None:
    async def main() -> None:
        case = await Case().started()
        case.kill = SandboxError("the daemon does not answer")
        for _ in range(2):
            with pytest.raises(SandboxError, match="case-1 could not be ended: the daemon does not answer"):
                await case.box.stop()
        assert case.done == ["killed", "forgotten"]
        faulty = await Case().started()
        faulty.kill = KeyError("Id")
        with pytest.raises(SandboxError, match="case-1 could not be ended: 'Id'"):
            await faulty.box.stop()
        other = await Case().started()
        other.kill_s = 1000
        with pytest.raises(SandboxError, match="case-1 could not be ended within 15 s"):
            await other.box.stop()
        assert (clock.now(), other.done) == (15, ["killed", "forgotten"])

    run(main)


def test_a_box_that_is_released_is_let_go_and_not_killed() -> None:
    async def main() -> None:
        case = await Case().started()
        await case.box.release()
        assert (case.peer.is_closed, case.done) == (True, ["let go", "forgotten"])
        with pytest.raises(SandboxLostError):
            await case.box.probe(1)

    run(main)


def test_a_box_that_does_not_answer_to_who_comes_later_is_let_go_and_not_killed() -> None:
    async def main() -> None:
        case = Case()
        with pytest.raises(UnreachableError, match="cannot connect to sandbox case-1: not ready after 10 s"):
            await case.box.reached(10)
        assert (clock.now(), case.done) == (10, ["let go", "forgotten"])

        case = Case()
        case.peer.say(HELLO)
        await case.box.reached(10)
        await case.box.stop()
        assert case.done == ["killed", "forgotten"]

    run(main)


def test_what_is_done_beside_a_box_ends_with_it() -> None:
    async def main() -> None:
        case = await Case().started()
        ended = anyio.Event()

        async def work() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

        case.box.while_alive(work())
        await anyio.sleep(1)
        case.peer.say_bytes(b"")
        await ended.wait()
        assert clock.now() == 1

    run(main)


class Stopping:
    """A box that takes its time, or fails, to stop."""

    def __init__(self, stop_s: float, failure: str = "") -> None:
        self.stop_s = stop_s
        self.failure = failure

    async def stop(self) -> None:
        await anyio.sleep(self.stop_s)
        if self.failure:
            raise SandboxError(self.failure)


def test_leaving_a_backend_stops_all_at_once_and_says_which_could_not_be() -> None:
    async def main() -> None:
        boxes = LiveSandboxes("case")
        await boxes.open()
        folder = boxes.folder
        assert [boxes.new_id(), boxes.new_id()] == ["case-1", "case-2"]
        assert boxes.new_folder("case-1") == folder / "case-1"
        gone = Stopping(1000)
        for box in (gone, Stopping(3), Stopping(5, "case-3 could not be ended"), Stopping(4)):
            boxes.add(box)
        boxes.forget(gone)
        with pytest.raises(SandboxError, match=r"^case-3 could not be ended$"):
            await boxes.close()
        assert (clock.now(), folder.exists()) == (5, False)
        with pytest.raises(SandboxError, match="is not open"):
            boxes.new_id()

    run(main)
