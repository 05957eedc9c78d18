"""Scripted boxes: what the script says happens, at the time that it says, and the same each time."""

from __future__ import annotations

import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import pytest

from envkit import clock
from envkit.errors import (
    DeadlineError,
    MissingFileError,
    SandboxLostError,
    SandboxStartError,
    TooLargeError,
    UnreachableError,
    UsageError,
)
from envkit.protocols import Sandbox, SandboxBackend
from envkit.types import ExecResult, SandboxSpec
from tests.causes import cause
from tests.sandbox.fake.backend import Command, FakeBackend, FakeSandbox, Fate

T = TypeVar("T")


def with_box(fate: Fate, use: Callable[[FakeSandbox], Awaitable[T]], spec: SandboxSpec | None = None) -> T:
    """Use one box of this fate on virtual time."""

    async def main() -> T:
        async with FakeBackend(lambda number, rng: fate) as backend:
            return await use(await backend.start(spec or SandboxSpec()))

    return clock.run(main, virtual=True)


def test_a_fake_is_a_sandbox_for_the_type_checker() -> None:
    backend: SandboxBackend = FakeBackend()

    async def use(box: FakeSandbox) -> str:
        sandbox: Sandbox = box
        return sandbox.id

    assert with_box(Fate(), use) == "fake-0"
    assert set(backend.capabilities().values()) == {True}


def test_a_start_takes_as_long_as_the_script_says() -> None:
    async def use(box: FakeSandbox) -> float:
        return clock.now()

    assert with_box(Fate(start_s=12.5), use) == 12.5


def test_a_sandbox_that_is_not_ready_in_time_has_failed() -> None:
    async def use(box: FakeSandbox) -> None: ...

    with pytest.raises(SandboxStartError, match="fake-0 did not start: not ready after 30 s"):
        with_box(Fate(start_s=31), use)


def test_a_start_can_fail_for_a_reason() -> None:
    async def use(box: FakeSandbox) -> None: ...

    with pytest.raises(SandboxStartError, match="did not start: no such image"):
        with_box(Fate(start_failure="no such image"), use)


def test_commands_do_what_the_answer_says_and_take_its_time() -> None:
    def answer(command: Command) -> ExecResult:
        command.files["/workspace/seen"] = command.stdin
        return ExecResult(3, " ".join(command.argv).encode(), duration_s=2)

    async def use(box: FakeSandbox) -> None:
        result = await box.exec(["make", "test"], timeout_s=5, stdin=b"in")
        assert (result.exit_code, result.stdout, clock.now()) == (3, "make test", 2.0)
        assert await box.read("seen") == b"in"
        assert [command.cwd for command in box.commands] == ["/workspace"]

    with_box(Fate(answer=answer), use)


def test_a_command_that_takes_longer_than_it_may_is_stopped() -> None:
    async def use(box: FakeSandbox) -> None:
        result = await box.exec(["sleep", "9"], timeout_s=4)
        assert (result.exit_code, result.timed_out, result.duration_s, clock.now()) == (None, True, 4, 4.0)

    with_box(Fate(answer=lambda command: ExecResult(0, duration_s=9)), use)


def test_the_end_of_a_long_output_is_kept() -> None:
    async def use(box: FakeSandbox) -> None:
        result = await box.exec(["yes"], timeout_s=4, max_output_bytes=3)
        assert (result.stdout_bytes, result.stderr_bytes, result.truncated_bytes) == (b"def", b"x", 3)

    with_box(Fate(answer=lambda command: ExecResult(0, b"abcdef", b"x")), use)


def test_commands_of_one_shell_wait_for_each_other() -> None:
    async def use(box: FakeSandbox) -> None:
        ends: list[tuple[str, float]] = []

        async def run(command: str) -> None:
            await box.shell().run(command, timeout_s=5)
            ends.append((command, clock.now()))

        async with anyio.create_task_group() as tasks:
            for command in ("first", "second", "third"):
                tasks.start_soon(run, command)
        assert ends == [("first", 1.0), ("second", 2.0), ("third", 3.0)]
        assert {command.shell for command in box.commands} == {"main"}

    with_box(Fate(answer=lambda command: ExecResult(0, duration_s=1)), use)


def test_a_death_ends_what_runs_with_its_cause() -> None:
    async def use(box: FakeSandbox) -> None:
        with pytest.raises(SandboxLostError, match="fake-0 lost: out of memory"):
            await box.exec(["train"], timeout_s=100)
        assert clock.now() == 7.0
        assert str(await box.wait()) == "out of memory"
        with pytest.raises(SandboxLostError, match="out of memory"):
            await box.write("a", b"")

    with_box(
        Fate(dies_after_s=7, cause=cause("out of memory"), answer=lambda command: ExecResult(0, duration_s=50)), use
    )


def test_a_wait_returns_at_the_death() -> None:
    async def use(box: FakeSandbox) -> tuple[str, float]:
        return str(await box.wait()), clock.now()

    assert with_box(Fate(start_s=1, dies_after_s=7), use) == ("killed by signal 9 (SIGKILL)", 8.0)


def test_a_time_to_live_is_kept() -> None:
    async def use(box: FakeSandbox) -> tuple[str, float]:
        return str(await box.wait()), clock.now()

    assert with_box(Fate(dies_after_s=70), use, SandboxSpec(ttl_s=60)) == ("time to live exceeded", 60.0)


def test_a_sandbox_that_hangs_does_not_answer_a_probe() -> None:
    async def use(box: FakeSandbox) -> None:
        assert await box.probe(2) == 0.0
        await anyio.sleep(5)
        with pytest.raises(DeadlineError, match="did not answer within 2 s"):
            await box.probe(2)
        assert clock.now() == 7.0

    with_box(Fate(hangs_after_s=5), use)


def test_a_call_during_which_the_sandbox_hangs_ends_it_ten_seconds_after_the_timeout() -> None:
    async def use(box: FakeSandbox) -> None:
        with pytest.raises(SandboxLostError, match="it does not answer"):
            await box.exec(["sleep", "8"], timeout_s=9)
        assert clock.now() == 19.0
        assert str(await box.wait()) == "it does not answer"

    with_box(Fate(hangs_after_s=5, answer=lambda command: ExecResult(0, duration_s=8)), use)


def test_stopping_ends_what_runs() -> None:
    async def use(box: FakeSandbox) -> None:
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await anyio.sleep(3)
                await box.stop()
                await box.stop()

            tasks.start_soon(stop)
            with pytest.raises(SandboxLostError, match="stopped"):
                await box.exec(["sleep", "8"], timeout_s=9)
        assert clock.now() == 3.0

    with_box(Fate(answer=lambda command: ExecResult(0, duration_s=8)), use)


def test_leaving_the_backend_stops_its_sandboxes() -> None:
    async def main() -> list[str]:
        async with FakeBackend() as backend:
            boxes = [await backend.start(SandboxSpec()) for _ in range(2)]
        return [str(await box.wait()) for box in boxes]

    assert clock.run(main, virtual=True) == ["stopped", "stopped"]


def test_a_snapshot_is_a_copy() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            first = await backend.start(SandboxSpec())
            await first.write("a", b"then")
            name = await first.snapshot()
            await first.write("a", b"now")
            copy = await backend.restore(name, SandboxSpec())
            assert await copy.read("/workspace/a") == b"then"
            with pytest.raises(SandboxStartError, match="there is no snapshot 'other'"):
                await backend.restore("other", SandboxSpec())

    clock.run(main, virtual=True)


def test_folders_are_copied_in_and_out(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a").write_bytes(b"A")
    (tmp_path / "in" / "b").write_bytes(b"B")

    async def use(box: FakeSandbox) -> None:
        await box.upload(tmp_path / "in", "/data")
        await box.upload(tmp_path / "in" / "b", "c")
        assert box.files == {"/data/deep/a": b"A", "/data/b": b"B", "/workspace/c": b"B"}
        await box.download("/data", tmp_path / "out")
        await box.download("c", tmp_path / "c")
        with pytest.raises(UsageError, match="exists"):
            await box.download("c", tmp_path / "c")
        with pytest.raises(MissingFileError, match="nowhere"):
            await box.download("nowhere", tmp_path / "d")
        with pytest.raises(TooLargeError, match="more than 1 bytes"):
            await box.download("/data", tmp_path / "d", max_bytes=1)

    with_box(Fate(), use)
    assert (tmp_path / "out" / "deep" / "a").read_bytes() == b"A"
    assert (tmp_path / "out" / "b").read_bytes() == b"B"
    assert (tmp_path / "c").read_bytes() == b"B"


def test_a_file_that_is_missing_or_too_large_is_an_error() -> None:
    async def use(box: FakeSandbox) -> None:
        await box.write("a", b"four")
        with pytest.raises(MissingFileError, match="b: there is no such file"):
            await box.read("b")
        with pytest.raises(TooLargeError, match="more than 3 bytes"):
            await box.read("a", max_bytes=3)

    with_box(Fate(), use)


def test_a_connection_reaches_what_listens() -> None:
    def serve(theirs: socket.socket) -> None:
        theirs.send(b"hello")
        theirs.close()

    async def use(box: FakeSandbox) -> None:
        with await box.connect("env.sock") as ours:
            assert ours.recv(9) == b"hello"
        with pytest.raises(UnreachableError, match="nothing listens on 80"):
            await box.connect(80)

    with_box(Fate(listens={"env.sock": serve}), use)


def test_the_same_seed_gives_the_same_fates_whatever_the_order() -> None:
    def script(number: int, rng: random.Random) -> Fate:
        return Fate(start_s=rng.random(), dies_after_s=1 + rng.random())

    async def deaths(seed: int, gap_s: float) -> dict[str, float]:
        found: dict[str, float] = {}
        async with FakeBackend(script, seed=seed) as backend, anyio.create_task_group() as tasks:

            async def live() -> None:
                box = await backend.start(SandboxSpec())
                ready = clock.now()
                await box.wait()
                found[box.id] = round(clock.now() - ready, 9)

            for _ in range(4):
                tasks.start_soon(live)
                await anyio.sleep(gap_s)
        return found

    at_once, one_by_one, other = (clock.run(deaths, *how, virtual=True) for how in ((1, 0.0), (1, 5.0), (2, 0.0)))
    assert at_once == one_by_one
    assert at_once != other
    assert len(at_once) == 4


def test_what_is_not_enforced_is_refused() -> None:
    async def main() -> None:
        async with FakeBackend(capabilities={"memory": False}) as backend:
            with pytest.raises(SandboxStartError, match="memory_mib=64 is refused"):
                await backend.start(SandboxSpec(memory_mib=64))
            with pytest.raises(SandboxStartError, match="not enforced here: memory"):
                await backend.start(SandboxSpec(untrusted=True))

    clock.run(main, virtual=True)
