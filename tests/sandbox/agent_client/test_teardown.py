"""How sandboxes end: every caller gets the cause, and all host resources are released."""

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
from envkit.types import Cause, CauseKind
from tests.causes import cause
from tests.sandbox.agent_client.peer import HELLO, run
from tests.sandbox.sandbox_case import Case, answered


def test_every_call_on_a_dead_sandbox_raises_its_cause_and_it_is_cleaned_up_without_stop() -> None:
    async def main() -> None:
        case = await Case().started()
        case.cause, case.cause_s = "out of memory", 0.5
        causes = []

        async def ask(call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(SandboxLostError) as caught:
                await call()
            causes.append((caught.value.sandbox_id, str(caught.value.cause), clock.now()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, lambda: case.sandbox.exec(["x"], timeout_s=100))
            tasks.start_soon(ask, lambda: case.sandbox.shell().run("x", timeout_s=100))
            tasks.start_soon(ask, lambda: case.sandbox.read("x"))
            for _ in range(3):
                await case.peer.next_frame()
            case.peer.emit_bytes(b"")
            assert str(await case.sandbox.wait()) == "out of memory"
        assert causes == [("case-1", "out of memory", 0.5)] * 3
        assert case.done == ["asked", "killed", "forgotten"]
        for late in (case.sandbox.probe(1), case.sandbox.connect("x"), case.sandbox.snapshot(), case.sandbox.log()):
            with pytest.raises(SandboxLostError, match="case-1 lost: out of memory"):
                await late
        await case.sandbox.stop()
        assert str(await case.sandbox.wait()) == "out of memory"
        assert case.done == ["asked", "killed", "forgotten"]

    run(main)


@pytest.mark.parametrize(
    ("found", "farewell", "expected"),
    [
        (CauseKind.EXITED, "out_of_memory", Cause(CauseKind.OUT_OF_MEMORY, "out of memory", by_agent=True)),
        (CauseKind.EXITED, "exited", Cause(CauseKind.EXITED, "exited with code 3", by_agent=True)),
        (CauseKind.EXITED, "stopped", Cause(CauseKind.STOPPED, "its connection was closed")),
        (CauseKind.EXITED, "expired", Cause(CauseKind.EXPIRED, "time to live exceeded")),
        (CauseKind.EXITED, "orphaned", Cause(CauseKind.ORPHANED, "no client connected for orphan_ttl_s")),
        (CauseKind.EXITED, None, Cause(CauseKind.EXITED, "exited with code 3")),
        (CauseKind.KILLED, "exited", Cause(CauseKind.KILLED, "exited with code 3")),
        (CauseKind.BACKEND_LOST, "out_of_memory", Cause(CauseKind.OUT_OF_MEMORY, "out of memory", by_agent=True)),
        (CauseKind.BACKEND_LOST, "exited", Cause(CauseKind.BACKEND_LOST, "exited with code 3")),
    ],
)
def test_the_farewell_of_the_agent_is_the_cause_only_if_process_1_exited_or_was_removed(
    found: CauseKind, farewell: str | None, expected: Cause
) -> None:
    async def main() -> None:
        case = await Case().started()
        case.cause = cause("exited with code 3", found)
        if farewell is not None:
            case.peer.emit({"ending": farewell})
        case.peer.emit_bytes(b"")
        assert await case.sandbox.wait() == expected

    run(main)


@pytest.mark.parametrize("by_agent", [False, True])
def test_a_start_that_ran_out_of_memory_ended_by_itself_only_at_the_sandbox_s_own_limit(by_agent: bool) -> None:
    error = not_ready("case-1", cause("out of memory", CauseKind.OUT_OF_MEMORY, by_agent=by_agent))
    assert isinstance(error, SandboxEndedError) == by_agent


def test_a_cause_that_is_not_found_does_not_delay_the_callers() -> None:
    async def main() -> None:
        case = await Case().started()
        case.cause_s = 1000
        case.peer.emit_bytes(b"")
        assert str(await case.sandbox.wait()) == "it has ended"
        assert clock.now() == 3
        other = await Case().started()
        other.cause = SandboxError("the daemon does not answer")
        other.peer.emit_bytes(b"")
        assert str(await other.sandbox.wait()) == "it has ended"
        await other.sandbox.stop()
        assert other.done == ["asked", "killed", "forgotten"]
        faulty = await Case().started()
        faulty.cause = KeyError("State")
        faulty.peer.emit_bytes(b"")
        assert str(await faulty.sandbox.wait()) == "it has ended; finding the cause failed: KeyError('State')"
        await faulty.sandbox.stop()
        assert faulty.done == ["asked", "killed", "forgotten"]

    run(main)


def test_an_unanswered_probe_does_not_end_the_sandbox() -> None:
    async def main() -> None:
        case = await Case().started()
        with pytest.raises(DeadlineError, match=r"the sandbox did not answer within 0.5 s"):
            await case.sandbox.probe(0.5)
        assert (clock.now(), case.done) == (0.5, [])
        for header in [(await case.peer.next_frame())[0] for _ in range(2)]:
            if "do" in header:
                case.peer.emit({"id": header["id"], "end": True})
        took = await answered(case, case.sandbox.probe(5), end=True)
        assert took == 0
        await case.sandbox.stop()

    run(main)


def test_concurrent_stops_all_wait_and_kill_the_sandbox_once() -> None:
    async def main() -> None:
        case = await Case().started()
        case.kill_s = 2

        async def work() -> None:
            with pytest.raises(SandboxLostError, match="lost: stopped"):
                await case.sandbox.exec(["x"], timeout_s=100)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await case.peer.next_frame()
            tasks.start_soon(case.sandbox.stop)
            tasks.start_soon(case.sandbox.stop)
            with anyio.move_on_after(1) as limit:
                await case.sandbox.stop()
            assert (clock.now(), limit.cancelled_caught) == (2, False)
        await case.sandbox.stop()
        assert (clock.now(), case.done) == (2, ["killed", "forgotten"])
        assert str(await case.sandbox.wait()) == "stopped"

    run(main)


def test_stop_raises_if_the_kill_fails_or_hangs() -> None:
    async def main() -> None:
        case = await Case().started()
        case.kill = SandboxError("the daemon does not answer")
        for _ in range(2):
            with pytest.raises(SandboxError, match="case-1 could not be ended: the daemon does not answer"):
                await case.sandbox.stop()
        assert case.done == ["killed", "forgotten"]
        faulty = await Case().started()
        faulty.kill = KeyError("Id")
        with pytest.raises(SandboxError, match="case-1 could not be ended: 'Id'"):
            await faulty.sandbox.stop()
        other = await Case().started()
        other.kill_s = 1000
        with pytest.raises(SandboxError, match="case-1 could not be ended within 15 s"):
            await other.sandbox.stop()
        assert (clock.now(), other.done) == (15, ["killed", "forgotten"])

    run(main)


def test_a_sandbox_that_does_not_answer_a_later_client_is_released_and_not_killed() -> None:
    async def main() -> None:
        case = Case()
        with pytest.raises(UnreachableError, match="cannot connect to sandbox case-1: not ready after 10 s"):
            await case.sandbox.reached(10)
        assert (clock.now(), case.done) == (10, ["released", "forgotten"])

        case = Case()
        case.peer.emit(HELLO)
        await case.sandbox.reached(10)
        await case.sandbox.stop()
        assert case.done == ["killed", "forgotten"]

    run(main)


def test_background_work_ends_with_its_sandbox() -> None:
    async def main() -> None:
        case = await Case().started()
        ended = anyio.Event()

        async def work() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

        case.sandbox.while_alive(work())
        await anyio.sleep(1)
        case.peer.emit_bytes(b"")
        await ended.wait()
        assert clock.now() == 1

    run(main)


class Stopping:
    """A sandbox that stops slowly or fails to stop."""

    def __init__(self, stop_s: float, failure: str = "") -> None:
        self.stop_s = stop_s
        self.failure = failure

    async def stop(self) -> None:
        await anyio.sleep(self.stop_s)
        if self.failure:
            raise SandboxError(self.failure)


def test_leaving_a_backend_stops_its_sandboxes_concurrently_and_names_those_that_failed() -> None:
    async def main() -> None:
        sandboxes = LiveSandboxes("case")
        await sandboxes.open()
        folder = sandboxes.folder
        assert [sandboxes.new_id(), sandboxes.new_id()] == ["case-1", "case-2"]
        gone = Stopping(1000)
        for sandbox in (gone, Stopping(3), Stopping(5, "case-3 could not be ended"), Stopping(4)):
            sandboxes.add(sandbox)
        sandboxes.forget(gone)
        with pytest.raises(SandboxError, match=r"^case-3 could not be ended$"):
            await sandboxes.close()
        assert (clock.now(), folder.exists()) == (5, False)
        with pytest.raises(SandboxError, match="is not open"):
            sandboxes.new_id()

    run(main)
