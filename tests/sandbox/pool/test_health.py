"""Liveness probes: missed answers, our own event-loop lag, and their alerts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.clock import compensate_loop_lag
from envkit.errors import SandboxLostError
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import LivenessTimes
from envkit.sandbox.pool.node import Node
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.types import JSON, Cause, ExecResult, SandboxSpec, SandboxState
from envkit.types.sandboxes import Blocked
from tests.causes import cause
from tests.sandbox.fake.backend import FakeBackend, FakeSandbox, Fate
from tests.sandbox.pool.pools import SPEC, opened, past_events, run, states

STARTING, READY, LEASED, SUSPECT, LOST, STOPPED = SandboxState
WATCH = LivenessTimes()


def test_a_sandbox_that_hangs_is_suspect_first_and_lost_within_five_seconds() -> None:
    def answer(command: object) -> ExecResult:
        return ExecResult(0, duration_s=100)

    async def main() -> None:
        async with opened(Fate(hangs_after_s=10.1, answer=answer)) as (pool, _):
            await pool.create("a", SPEC)
            with pytest.raises(SandboxLostError, match="a lost: no answer for 4 s"):
                await pool.get("a").exec(["sleep", "100"], timeout_s=200)
            assert 14 <= clock.now() <= 15.1
            assert states(pool.view("a")) == [STARTING, LEASED, SUSPECT, LOST]
            assert pool.counts().losses == {"unresponsive": 1}

    run(main)


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_suspect_that_answers_again_returns_to_its_state(is_warm: bool) -> None:
    async def main() -> None:
        async with opened(stocks=[WarmSpec(SPEC, 1)] if is_warm else []) as (pool, backend):
            if not is_warm:
                await pool.create("pool", SPEC)
            await anyio.sleep(5)
            backend.sandboxes[0].pause()
            await anyio.sleep(2.5)
            view = pool.views()[0]
            assert view.state is SUSPECT
            assert view.phases[-1].reason == "no answer for 1.5 s"
            backend.sandboxes[0].resume()
            await anyio.sleep(0.5)
            before = READY if is_warm else LEASED
            assert states(pool.views()[0]) == [STARTING, before, SUSPECT, before]
            alerts = [event for event in await past_events(pool) if event.kind == "probe"]
            assert len(alerts) == 1
            assert alerts[0].text.startswith("slow probe: 1.") or alerts[0].text.startswith("slow probe: 2.")

    run(main)


def test_a_suspect_warm_sandbox_is_not_leased() -> None:
    async def main() -> None:
        async with opened(stocks=[WarmSpec(SPEC, 1)]) as (pool, backend):
            await anyio.sleep(5)
            backend.sandboxes[0].pause()
            await anyio.sleep(2.5)
            async with pool.lease(SPEC) as sandbox:
                assert pool.view(sandbox.id).backend_id == "fake-1"

    run(main)


def test_an_answered_call_counts_as_an_answered_probe() -> None:
    class Deaf(FakeSandbox):
        """Answers calls, but neither probes nor requests for statistics."""

        async def probe(self, timeout_s: float) -> float:
            await anyio.sleep_forever()
            return 0.0

        async def stats(self) -> Mapping[str, JSON]:
            await anyio.sleep_forever()
            return {}

    async def main() -> None:
        async with FakeBackend(kind=Deaf) as backend, Pool([Node("here", backend)]) as pool:
            await pool.create("a", SPEC)
            sandbox = pool.get("a")
            for _ in range(30):
                await anyio.sleep(0.9)
                await sandbox.exec(["true"], timeout_s=1)
            assert states(pool.view("a")) == [STARTING, LEASED]
            await anyio.sleep(4.6)
            assert pool.view("a").state is LOST

    run(main)


def test_our_own_event_loop_lag_does_not_count_as_a_missed_probe() -> None:
    liveness_times = LivenessTimes(interval_s=0.04, suspect_s=0.1, lost_s=0.2)

    async def main() -> None:
        async with FakeBackend() as backend, Pool([Node("here", backend)], liveness_times=liveness_times) as pool:
            for number in range(20):
                await pool.create(f"sandbox {number}", SPEC)
            for _ in range(3):
                await anyio.sleep(0.1)
                threading.Event().wait(0.5)  # block the event loop
            await anyio.sleep(0.3)
            assert {view.state for view in pool.views()} == {LEASED}

    clock.run(main)


def test_a_sandbox_with_unread_output_is_not_lost() -> None:
    class Unread(FakeSandbox):
        is_excused = True

    async def main() -> None:
        async with FakeBackend(kind=Unread) as backend, Pool([Node("here", backend)]) as pool:
            await pool.create("a", SPEC)
            backend.sandboxes[0].pause()
            await anyio.sleep(30)
            assert pool.view("a").state is LEASED
            Unread.is_excused = False
            await anyio.sleep(5)
            assert pool.view("a").state is LOST

    run(main)


def test_memory_or_a_disk_that_is_almost_full_is_an_alert_once_a_minute_and_counted() -> None:
    class Full(FakeSandbox):
        async def stats(self) -> Mapping[str, JSON]:
            is_full = not self.id.endswith("0")
            return {"disk_place": "/tmp", "disk_percent": 89 + is_full, "memory_bytes": (57 + is_full) << 20}

    async def main() -> None:
        async with FakeBackend(kind=Full) as backend, Pool([Node("here", backend)]) as pool:
            await pool.create("a", SandboxSpec(memory_mib=64))
            await pool.create("b", SandboxSpec(memory_mib=64), tenant="ann")
            pool.alert("disk", "the disk of /tmp has 3 MiB free")
            await anyio.sleep(65)
            alerts = [event for event in await past_events(pool) if event.kind == "disk"]
            assert [(event.sandbox_id, event.tenant, event.text) for event in alerts] == [
                ("", "", "the disk of /tmp has 3 MiB free"),
                ("b", "ann", "90 % of the disk limit at /tmp in use"),
            ]
            await anyio.sleep(65)
            memory = [event for event in await past_events(pool) if event.kind == "memory"]
            assert [(event.sandbox_id, event.tenant) for event in memory] == [("b", "ann")] * 3
            assert memory[0].text == "58 of 64 MiB of memory in use"
            assert pool.counts().alerts == {"disk": 4, "memory": 3}

    run(main)


def test_an_unhandled_exception_of_one_sandbox_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(FakeSandbox):
        async def stop(self) -> None:
            await super().stop()
            raise RuntimeError("an unexpected answer of the daemon")

        async def diagnose(self) -> Blocked:
            raise KeyError("State")

    async def main() -> None:
        async with FakeBackend(kind=Odd) as backend, Pool([Node("here", backend)]) as pool:
            for name in ("a", "b", "c"):
                await pool.create(name, SPEC)
            backend.sandboxes[0].pause()
            await pool.stop("b")
            await anyio.sleep(6)
            assert pool.view("a").phases[-1].reason == "KeyError: 'State', no answer for 4 s"
            assert await pool.get("c").probe(5) < 5
            alerts = [(event.sandbox_id, event.text) for event in await past_events(pool) if event.kind == "stop"]
            why = "sandbox may be left behind: RuntimeError: an unexpected answer of the daemon"
            assert alerts == [("b", why), ("a", why)]

    run(main)
    assert caplog.text.count("unhandled exception") == 4


@pytest.mark.parametrize("reason", list(Blocked))
def test_a_sandbox_that_its_programs_keep_from_answering_is_lost_by_the_agent(reason: Blocked) -> None:
    class Silent(FakeSandbox):
        async def diagnose(self) -> Blocked:
            return reason

    async def main() -> None:
        async with FakeBackend(kind=Silent) as backend, Pool([Node("here", backend)]) as pool:
            await pool.create("a", SPEC)
            backend.sandboxes[0].pause()
            await anyio.sleep(6)
            with pytest.raises(SandboxLostError) as lost:
                await pool.get("a").probe(5)
            assert lost.value.cause.by_agent is (reason is Blocked.PROCESS_LIMIT)

    run(main)


def test_the_check_of_an_owner_is_a_part_of_each_probe() -> None:
    async def answer_for_a_while(lost_s: float) -> None:
        assert lost_s == WATCH.lost_s
        if clock.now() > 5:
            await anyio.sleep_forever()

    async def fail(lost_s: float) -> None:
        raise ZeroDivisionError

    async def find_lost(lost_s: float) -> None:
        raise SandboxLostError("c", cause("server hung"))

    async def answer(lost_s: float) -> None:
        await anyio.lowlevel.checkpoint()

    async def main() -> None:
        async with opened() as (pool, _):
            ended: list[str] = []

            def report(id: str, cause: Cause) -> None:
                ended.append(f"{clock.now():g} {id}: {cause}")

            for id, check in (("a", answer_for_a_while), ("b", fail), ("c", find_lost), ("d", answer)):
                await pool.create(id, SPEC)
                pool.watch(id, check, partial(report, id))
            assert str(await pool.get("a").wait()) == "env server did not answer for 4 s"
            with pytest.raises(SandboxLostError, match="a lost: env server did not answer"):
                pool.watch("a", answer, partial(report, "a"))
            pool.lose("d", cause("its owner says so"))
            assert ended == [
                "1 b: ZeroDivisionError: ",
                "1 c: server hung",
                "9 a: env server did not answer for 4 s",
                "9 d: its owner says so",
            ]

    run(main)


def test_event_loop_lag_moves_the_last_answer_but_not_into_the_future() -> None:
    assert compensate_loop_lag(10.0, 3.0, now=15.0) == 13.0
    assert compensate_loop_lag(14.0, 3.0, now=15.0) == 15.0
    assert compensate_loop_lag(10.0, 0.25, now=15.0) == 10.0


def test_liveness_times_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="0 < interval_s < suspect_s < lost_s"):
        LivenessTimes(interval_s=2, suspect_s=1.5)
