"""Scripted sandboxes do what their script says, at its times, and the same in each run."""

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


def use_sandbox(fate: Fate, use: Callable[[FakeSandbox], Awaitable[T]], spec: SandboxSpec | None = None) -> T:
    """Use a sandbox with this fate on virtual time."""

    async def main() -> T:
        async with FakeBackend(lambda number, rng: fate) as backend:
            return await use(await backend.start(spec or SandboxSpec()))

    return clock.run(main, virtual=True)


def test_a_fake_satisfies_the_protocols() -> None:
    backend: SandboxBackend = FakeBackend()

    async def use(fake: FakeSandbox) -> str:
        sandbox: Sandbox = fake
        return sandbox.id

    assert use_sandbox(Fate(), use) == "fake-0"
    assert set(backend.capabilities().values()) == {True}


def test_a_start_takes_as_long_as_the_script_says() -> None:
    async def use(sandbox: FakeSandbox) -> float:
        return clock.now()

    assert use_sandbox(Fate(start_s=12.5), use) == 12.5


def test_a_start_that_takes_too_long_fails() -> None:
    async def use(sandbox: FakeSandbox) -> None: ...

    with pytest.raises(SandboxStartError, match="fake-0 did not start: not ready after 30 s"):
        use_sandbox(Fate(start_s=31), use)


def test_a_start_can_fail_with_a_cause() -> None:
    async def use(sandbox: FakeSandbox) -> None: ...

    with pytest.raises(SandboxStartError, match="did not start: no such image"):
        use_sandbox(Fate(start_failure="no such image"), use)


def test_commands_have_the_effect_and_duration_of_the_answer() -> None:
    def answer(command: Command) -> ExecResult:
        command.files["/workspace/seen"] = command.stdin
        return ExecResult(3, " ".join(command.argv).encode(), duration_s=2)

    async def use(sandbox: FakeSandbox) -> None:
        result = await sandbox.exec(["make", "test"], timeout_s=5, stdin=b"in")
        assert (result.exit_code, result.stdout, clock.now()) == (3, "make test", 2.0)
        assert await sandbox.read("seen") == b"in"
        assert [command.cwd for command in sandbox.commands] == ["/workspace"]

    use_sandbox(Fate(answer=answer), use)


def test_a_command_is_stopped_at_its_timeout() -> None:
    async def use(sandbox: FakeSandbox) -> None:
        result = await sandbox.exec(["sleep", "9"], timeout_s=4)
        assert (result.exit_code, result.timed_out, result.duration_s, clock.now()) == (None, True, 4, 4.0)

    use_sandbox(Fate(answer=lambda command: ExecResult(0, duration_s=9)), use)


def test_the_end_of_a_long_output_is_kept() -> None:
    async def use(sandbox: FakeSandbox) -> None:
        result = await sandbox.exec(["yes"], timeout_s=4, max_output_bytes=3)
        assert (result.stdout_bytes, result.stderr_bytes, result.truncated_bytes) == (b"def", b"x", 3)

    use_sandbox(Fate(answer=lambda command: ExecResult(0, b"abcdef", b"x")), use)


def test_commands_of_one_shell_wait_for_each_other() -> None:
    async def use(sandbox: FakeSandbox) -> None:
        ends: list[tuple[str, float]] = []

        async def run(command: str) -> None:
            await sandbox.shell().run(command, timeout_s=5)
            ends.append((command, clock.now()))

        async with anyio.create_task_group() as tasks:
            for command in ("first", "second", "third"):
                tasks.start_soon(run, command)
        assert ends == [("first", 1.0), ("second", 2.0), ("third", 3.0)]
        assert {command.shell for command in sandbox.commands} == {"main"}

    use_sandbox(Fate(answer=lambda command: ExecResult(0, duration_s=1)), use)


def test_the_death_of_a_sandbox_ends_its_calls_with_the_cause() -> None:
    async def use(sandbox: FakeSandbox) -> None:
        with pytest.raises(SandboxLostError, match="fake-0 lost: out of memory"):
            await sandbox.exec(["train"], timeout_s=100)
        assert clock.now() == 7.0
        assert str(await sandbox.wait()) == "out of memory"
        with pytest.raises(SandboxLostError, match="out of memory"):
            await sandbox.write("a", b"")

    use_sandbox(
        Fate(dies_after_s=7, cause=cause("out of memory"), answer=lambda command: ExecResult(0, duration_s=50)), use
    )


def test_a_wait_returns_at_the_death() -> None:
    async def use(sandbox: FakeSandbox) -> tuple[str, float]:
        return str(await sandbox.wait()), clock.now()

    assert use_sandbox(Fate(start_s=1, dies_after_s=7), use) == ("killed by signal 9 (SIGKILL)", 8.0)


def test_a_sandbox_ends_after_its_time_to_live() -> None:
    async def use(sandbox: FakeSandbox) -> tuple[str, float]:
        return str(await sandbox.wait()), clock.now()

    assert use_sandbox(Fate(dies_after_s=70), use, SandboxSpec(ttl_s=60)) == ("time to live exceeded", 60.0)


def test_a_sandbox_that_hangs_does_not_answer_a_probe() -> None:
    async def use(sandbox: FakeSandbox) -> None:
        assert await sandbox.probe(2) == 0.0
        await anyio.sleep(5)
        with pytest.raises(DeadlineError, match="did not answer within 2 s"):
            await sandbox.probe(2)
        assert clock.now() == 7.0

    use_sandbox(Fate(hangs_after_s=5), use)


def test_a_call_during_which_the_sandbox_hangs_ends_it_ten_seconds_after_the_timeout() -> None:
    async def use(sandbox: FakeSandbox) -> None:
        with pytest.raises(SandboxLostError, match="it does not answer"):
            await sandbox.exec(["sleep", "8"], timeout_s=9)
        assert clock.now() == 19.0
        assert str(await sandbox.wait()) == "it does not answer"

    use_sandbox(Fate(hangs_after_s=5, answer=lambda command: ExecResult(0, duration_s=8)), use)


def test_stopping_a_sandbox_ends_its_calls() -> None:
    async def use(sandbox: FakeSandbox) -> None:
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await anyio.sleep(3)
                await sandbox.stop()
                await sandbox.stop()

            tasks.start_soon(stop)
            with pytest.raises(SandboxLostError, match="stopped"):
                await sandbox.exec(["sleep", "8"], timeout_s=9)
        assert clock.now() == 3.0

    use_sandbox(Fate(answer=lambda command: ExecResult(0, duration_s=8)), use)


def test_leaving_the_backend_stops_its_sandboxes() -> None:
    async def main() -> list[str]:
        async with FakeBackend() as backend:
            sandboxes = [await backend.start(SandboxSpec()) for _ in range(2)]
        return [str(await sandbox.wait()) for sandbox in sandboxes]

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

    async def use(sandbox: FakeSandbox) -> None:
        await sandbox.upload(tmp_path / "in", "/data")
        await sandbox.upload(tmp_path / "in" / "b", "c")
        assert sandbox.files == {"/data/deep/a": b"A", "/data/b": b"B", "/workspace/c": b"B"}
        await sandbox.download("/data", tmp_path / "out")
        await sandbox.download("c", tmp_path / "c")
        with pytest.raises(UsageError, match="exists"):
            await sandbox.download("c", tmp_path / "c")
        with pytest.raises(MissingFileError, match="nowhere"):
            await sandbox.download("nowhere", tmp_path / "d")
        with pytest.raises(TooLargeError, match="more than 1 bytes"):
            await sandbox.download("/data", tmp_path / "d", max_bytes=1)

    use_sandbox(Fate(), use)
    assert (tmp_path / "out" / "deep" / "a").read_bytes() == b"A"
    assert (tmp_path / "out" / "b").read_bytes() == b"B"
    assert (tmp_path / "c").read_bytes() == b"B"


def test_a_file_that_is_missing_or_too_large_is_an_error() -> None:
    async def use(sandbox: FakeSandbox) -> None:
        await sandbox.write("a", b"four")
        with pytest.raises(MissingFileError, match="b: there is no such file"):
            await sandbox.read("b")
        with pytest.raises(TooLargeError, match="more than 3 bytes"):
            await sandbox.read("a", max_bytes=3)

    use_sandbox(Fate(), use)


def test_a_connection_reaches_its_listener() -> None:
    def serve(theirs: socket.socket) -> None:
        theirs.send(b"hello")
        theirs.close()

    async def use(sandbox: FakeSandbox) -> None:
        with await sandbox.connect("env.sock") as ours:
            assert ours.recv(9) == b"hello"
        with pytest.raises(UnreachableError, match="nothing listens on 80"):
            await sandbox.connect(80)

    use_sandbox(Fate(listens={"env.sock": serve}), use)


def test_the_same_seed_gives_the_same_fates_in_any_order() -> None:
    def script(number: int, rng: random.Random) -> Fate:
        return Fate(start_s=rng.random(), dies_after_s=1 + rng.random())

    async def deaths(seed: int, gap_s: float) -> dict[str, float]:
        found: dict[str, float] = {}
        async with FakeBackend(script, seed=seed) as backend, anyio.create_task_group() as tasks:

            async def live() -> None:
                sandbox = await backend.start(SandboxSpec())
                ready = clock.now()
                await sandbox.wait()
                found[sandbox.id] = round(clock.now() - ready, 9)

            for _ in range(4):
                tasks.start_soon(live)
                await anyio.sleep(gap_s)
        return found

    at_once, one_by_one, other = (clock.run(deaths, *how, virtual=True) for how in ((1, 0.0), (1, 5.0), (2, 0.0)))
    assert at_once == one_by_one
    assert at_once != other
    assert len(at_once) == 4


def test_a_limit_that_is_not_enforced_is_rejected() -> None:
    async def main() -> None:
        async with FakeBackend(capabilities={"memory": False}) as backend:
            with pytest.raises(SandboxStartError, match="memory_mib=64 is refused"):
                await backend.start(SandboxSpec(memory_mib=64))
            with pytest.raises(SandboxStartError, match="not enforced here: memory"):
                await backend.start(SandboxSpec(untrusted=True))

    clock.run(main, virtual=True)
