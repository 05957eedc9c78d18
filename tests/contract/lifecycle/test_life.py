"""One promise for every kind of sandbox: once started it runs, everybody hears how it dies, nothing stays behind."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from envkit import clock
from envkit.errors import (
    DeadlineError,
    SandboxEndedError,
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
)
from envkit.protocols import Sandbox
from envkit.sandbox.bubblewrap.backend import LocalBackend, why_unavailable
from envkit.types import Cause, CauseKind, SandboxSpec
from tests.contract.kinds import (
    SOON_S,
    Kind,
    agent_above,
    arguments,
    processes,
    run,
    sleepers,
    traces,
    until,
)


@asynccontextmanager
async def sleeping(kind: Kind, marker: str) -> AsyncIterator[tuple[Sandbox, int]]:
    """Start a sandbox in which `marker` sleeps; gives it and, as the machine sees it, the process of its agent."""
    async with kind.sandbox() as sandbox, anyio.create_task_group() as tasks:

        async def sleep() -> None:
            with suppress(SandboxLostError):
                await sandbox.exec(["sleep", marker], timeout_s=1000)

        tasks.start_soon(sleep)
        await until(lambda: len(sleepers(marker)) == 1)
        yield sandbox, agent_above(sleepers(marker)[0])
        tasks.cancel_scope.cancel()
    await until(lambda: not sleepers(marker))  # so that the next sandbox's is not taken for this one's


def test_a_sandboxs_command_runs_as_soon_as_it_has_started(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.sandbox("sh", "-c", f"echo $X > here; exec sleep {marker}", env={"X": "a b"}) as sandbox:
            await until(lambda: len(sleepers(marker)) == 1)
            assert await sandbox.read("here") == b"a b\n"

    run(main)


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("echo no luck today >&2; exit 3", Cause(CauseKind.EXITED, "exited with code 3: no luck today", by_agent=True)),
        # It may come from outside.
        ("kill -9 $$", Cause(CauseKind.KILLED, "killed by signal 9 (SIGKILL)")),
    ],
)
def test_a_command_that_ends_takes_its_sandbox_with_it_and_leaves_the_cause(
    kind: Kind, command: str, cause: Cause
) -> None:
    async def main() -> None:
        waits = "until [ -e go ]; do sleep 0.01; done"
        async with kind.sandbox("sh", "-c", f"{waits}; {command}") as sandbox:
            async with anyio.create_task_group() as tasks:

                async def work() -> None:
                    with pytest.raises(SandboxLostError) as caught:
                        await sandbox.exec(["sleep", "1000"], timeout_s=1000)
                    assert (caught.value.sandbox_id, caught.value.cause) == (sandbox.id, cause)

                tasks.start_soon(work)
                await sandbox.write("go", b"")
                assert await sandbox.wait() == cause
            await sandbox.stop()
            assert await sandbox.wait() == cause
            with pytest.raises(SandboxLostError, match=sandbox.id):
                await sandbox.probe(5)

    run(main)


def test_a_program_that_does_not_exist_is_a_failed_start(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            empty = traces()
            with pytest.raises(SandboxEndedError, match=r"code 127: .*no-such-program"):
                await backend.start(kind.spec("no-such-program"))
            assert traces() == empty

    run(main)


def test_what_a_command_writes_to_standard_error_is_kept_up_to_a_bound(kind: Kind) -> None:
    async def main() -> None:
        flood = "seq -f %062.0f 5000 | sed s/^/x/ >&2; touch done; sleep 1000"
        async with kind.sandbox("sh", "-c", flood) as sandbox:
            done = await sandbox.exec(["sh", "-c", "until [ -e done ]; do sleep 0.01; done"], timeout_s=20)
            assert done.exit_code == 0
            log = await sandbox.log()
            assert len(log) == 64 << 10
            assert log.startswith(f"x{5000 - 1023:062}\n")
            assert log.endswith(f"x{5000:062}\n")

    run(main)


def test_the_configuration_of_a_sandbox_is_in_no_argument_that_others_can_read(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.sandbox("sleep", marker, env={"KEY": f"open-sesame-{marker}"}) as sandbox:
            await until(lambda: len(sleepers(marker)) == 1)
            shell = sandbox.shell()
            await shell.run("true", timeout_s=20)
            assert (await shell.run("echo $KEY", timeout_s=20)).stdout == f"open-sesame-{marker}\n"
            assert [pid for pid in processes() if f"open-sesame-{marker}".encode() in b" ".join(arguments(pid))] == []

    run(main)


def test_stopping_ends_everybody_and_every_call(kind: Kind, marker: str) -> None:
    async def main() -> None:
        stubborn = f"(setsid sleep {marker} &) & trap '' TERM INT HUP; sleep {marker}"
        async with kind.sandbox("sh", "-c", stubborn) as sandbox:
            calls: list[Callable[[], object]] = [
                lambda: sandbox.exec(["sleep", marker], timeout_s=100),
                lambda: sandbox.shell().run(f"setsid sleep {marker} & sleep {marker}", timeout_s=100),
            ]
            causes = []

            async def work(call: Callable[[], object]) -> None:
                with pytest.raises(SandboxLostError) as caught:
                    await call()  # type: ignore[misc]
                causes.append(str(caught.value.cause))

            async with anyio.create_task_group() as tasks:
                for call in calls:
                    tasks.start_soon(work, call)
                await until(lambda: len(sleepers(marker)) == 5)
                began = clock.now()
                await sandbox.stop()
                assert clock.now() - began < SOON_S
                assert sleepers(marker) == []
            assert causes == ["stopped", "stopped"]
            assert await sandbox.wait() == Cause(CauseKind.STOPPED, "stopped")

    run(main)


def test_leaving_the_backend_stops_its_sandboxes_and_no_other_starts(kind: Kind, marker: str) -> None:
    before = traces()

    async def main() -> None:
        async with kind.backend() as backend:
            sandboxes = [await backend.start(kind.spec("sleep", marker)) for _ in range(3)]
            await until(lambda: len(sleepers(marker)) == 3)
        assert sleepers(marker) == []
        with pytest.raises(SandboxLostError):
            await sandboxes[0].exec(["true"], timeout_s=5)
        for closed in (backend, kind.backend()):
            with pytest.raises(SandboxError):
                await closed.start(kind.spec())

    run(main)
    assert traces() == before


def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing(kind: Kind, marker: str) -> None:
    before = traces()

    async def main() -> None:
        async with kind.backend() as backend:
            empty = traces()
            for moment_s in (0.0005, 0.005, 0.02, 0.05, 0.1, 0.2):
                with anyio.move_on_after(moment_s):
                    await (await backend.start(kind.spec("sleep", marker))).stop()
            assert traces() == empty
        assert sleepers(marker) == []

    run(main)
    assert traces() == before


def test_a_call_for_a_sandbox_that_dies_in_the_same_moment_says_so(kind: Kind, marker: str) -> None:
    async def main() -> None:
        for delay_s in (0.0, 0.01):
            async with sleeping(kind, marker) as (sandbox, agent):
                os.kill(agent, signal.SIGKILL)
                await anyio.sleep(delay_s)
                with pytest.raises(SandboxLostError, match="killed by signal 9"):
                    await sandbox.exec(["sleep", marker], timeout_s=20)

    run(main)


def test_an_agent_that_hangs_is_seen_by_probing_and_its_sandbox_can_be_stopped(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with sleeping(kind, marker) as (sandbox, agent):
            os.kill(agent, signal.SIGSTOP)
            began = clock.now()
            with pytest.raises(DeadlineError, match=r"did not answer within 0.2 s"):
                await sandbox.probe(0.2)
            assert clock.now() - began < 2
            await sandbox.stop()
            assert clock.now() - began < 8
            assert sleepers(marker) == []

    run(main)


def test_sandboxes_are_separate_and_do_not_disturb_each_other(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            sandboxes = [await backend.start(kind.spec()) for _ in range(3)]
            assert len({sandbox.id for sandbox in sandboxes}) == 3
            assert sandboxes[0].id.partition("-")[2] == "1"
            for number, sandbox in enumerate(sandboxes):
                await sandbox.write("file", b"%d" % number)
            await sandboxes[1].stop()
            assert [await sandboxes[number].read("file") for number in (0, 2)] == [b"0", b"2"]

    run(main)


def test_what_cannot_be_held_is_refused_and_named(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            capabilities = backend.capabilities()
            assert set(capabilities) == {"isolation", "network", "memory", "pids", "cpu", "disk", "uid", "seccomp"}
            missing = [name for name, holds in capabilities.items() if not holds]
            if missing:
                with pytest.raises(
                    SandboxRefusedError, match=f"untrusted programs are refused: .*{', '.join(missing)}"
                ):
                    await backend.start(kind.spec(untrusted=True))
            else:
                sandbox = await backend.start(kind.spec(untrusted=True))
                assert (await sandbox.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"
            bounds = {"memory": ("memory_mib", 64), "pids": ("pids", 50), "cpu": ("cpus", 0.5), "disk": ("disk_mib", 8)}
            for name, (field, value) in bounds.items():
                if not capabilities[name]:
                    with pytest.raises(SandboxRefusedError, match=f"{field}={value} is refused"):
                        await backend.start(kind.spec(**{field: value}))

    run(main)


def test_a_limit_of_zero_is_refused_since_it_would_mean_unlimited(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            for field, value in itertools.product(("memory_mib", "pids", "cpus", "disk_mib"), (0, -1)):
                with pytest.raises(SandboxRefusedError, match=f"{field}={value} is refused: it must be more than 0"):
                    await backend.start(kind.spec(**{field: value}))

    run(main)


def test_bubblewrap_is_available_exactly_where_its_sandboxes_start() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            try:
                await backend.start(SandboxSpec())
            except SandboxStartError:
                assert why_unavailable() is not None
            else:
                assert why_unavailable() is None

    run(main)
