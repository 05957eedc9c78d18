"""One promise for every kind of sandbox: once started it runs, everybody hears how it dies, nothing stays behind."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from envkit import clock
from envkit.errors import DeadlineError, SandboxEndedError, SandboxLostError, SandboxRefusedError, SandboxStartError
from envkit.protocols import Sandbox
from envkit.sandbox.bubblewrap.backend import LocalBackend, why_unavailable
from envkit.types import SandboxSpec
from tests.contract.boxes import (
    PARAMS,
    SOON_S,
    Kind,
    agent_above,
    arguments,
    groups_of,
    processes,
    run,
    sleepers,
    traces,
    until,
)


@asynccontextmanager
async def sleeping(kind: Kind, marker: str) -> AsyncIterator[tuple[Sandbox, int]]:
    """Start a box in which `marker` sleeps; gives it and, as the machine sees it, the process of its agent."""
    async with kind.box() as box, anyio.create_task_group() as tasks:

        async def sleep() -> None:
            with suppress(SandboxLostError):
                await box.exec(["sleep", marker], timeout_s=1000)

        tasks.start_soon(sleep)
        await until(lambda: len(sleepers(marker)) == 1)
        yield box, agent_above(sleepers(marker)[0])
        tasks.cancel_scope.cancel()


def test_a_box_answers_as_soon_as_it_has_started(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            assert 0 < await box.probe(5) < 5
            assert (await box.stats())["processes"] is not None

    run(main)


def test_a_boxs_command_runs_as_soon_as_it_has_started(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.box("sh", "-c", f"echo $X > here; exec sleep {marker}", env={"X": "a b"}) as box:
            await until(lambda: len(sleepers(marker)) == 1)
            assert await box.read("here") == b"a b\n"

    run(main)


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("exit 0", "exited with code 0"),
        ("echo no luck today >&2; exit 3", "exited with code 3: no luck today"),
        ("kill -9 $$", "killed by signal 9 (SIGKILL)"),
        ("kill -SEGV $$", "killed by signal 11 (SIGSEGV)"),
    ],
)
def test_a_command_that_ends_takes_its_box_with_it_and_leaves_the_cause(kind: Kind, command: str, cause: str) -> None:
    async def main() -> None:
        waits = "until [ -e go ]; do sleep 0.01; done"
        async with kind.box("sh", "-c", f"{waits}; {command}") as box:
            async with anyio.create_task_group() as tasks:

                async def work() -> None:
                    with pytest.raises(SandboxLostError) as caught:
                        await box.exec(["sleep", "1000"], timeout_s=1000)
                    assert (caught.value.sandbox_id, str(caught.value.cause)) == (box.id, cause)

                tasks.start_soon(work)
                await box.write("go", b"")
                assert str(await box.wait()) == cause
            await box.stop()
            assert str(await box.wait()) == cause
            with pytest.raises(SandboxLostError, match=box.id):
                await box.probe(5)

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
        async with kind.box("sh", "-c", flood) as box:
            done = await box.exec(["sh", "-c", "until [ -e done ]; do sleep 0.01; done"], timeout_s=20)
            assert done.exit_code == 0
            log = await box.log()
            assert len(log) == 64 << 10
            assert log.startswith(f"x{5000 - 1023:062}\n")
            assert log.endswith(f"x{5000:062}\n")

    run(main)


def test_what_a_box_is_told_is_in_no_argument_that_others_could_read(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.box("sleep", marker, env={"KEY": f"open-sesame-{marker}"}) as box:
            await until(lambda: len(sleepers(marker)) == 1)
            shell = box.shell()
            await shell.run("true", timeout_s=20)
            assert (await shell.run("echo $KEY", timeout_s=20)).stdout == f"open-sesame-{marker}\n"
            assert [pid for pid in processes() if f"open-sesame-{marker}".encode() in b" ".join(arguments(pid))] == []

    run(main)


def test_a_box_ends_itself_when_its_time_is_over(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.box("sleep", marker, ttl_s=1.0) as box:
            with anyio.fail_after(10):
                assert "time to live exceeded" in str(await box.wait())
            await box.stop()
            assert sleepers(marker) == []

    run(main)


def test_stopping_ends_everybody_and_every_call(kind: Kind, marker: str) -> None:
    async def main() -> None:
        stubborn = f"(setsid sleep {marker} &) & trap '' TERM INT HUP; sleep {marker}"
        async with kind.box("sh", "-c", stubborn) as box:
            calls: list[Callable[[], object]] = [
                lambda: box.exec(["sleep", marker], timeout_s=100),
                lambda: box.shell().run(f"setsid sleep {marker} & sleep {marker}", timeout_s=100),
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
                await box.stop()
                assert clock.now() - began < SOON_S
                assert sleepers(marker) == []
            assert causes == ["stopped", "stopped"]
            assert str(await box.wait()) == "stopped"

    run(main)


def test_nothing_is_left_of_a_stopped_box_nor_of_its_backend(kind: Kind, marker: str) -> None:
    before = traces()

    async def main() -> None:
        async with kind.backend() as backend:
            empty = traces()
            box = await backend.start(kind.spec("sleep", marker))
            await until(lambda: len(sleepers(marker)) == 1)
            groups = groups_of(sleepers(marker)[0])
            await box.write("file", b"x")
            await box.exec(["sh", "-c", "echo x > /tmp/y; rm /tmp/y"], timeout_s=20)
            await box.stop()
            assert sleepers(marker) == []
            assert [folder for folder in groups if folder.exists()] == []
            assert traces() == empty

    run(main)
    assert traces() == before


def test_leaving_the_backend_stops_its_boxes(kind: Kind, marker: str) -> None:
    before = traces()

    async def main() -> None:
        async with kind.backend() as backend:
            for _ in range(3):
                await backend.start(kind.spec("sleep", marker))
            await until(lambda: len(sleepers(marker)) == 3)
        assert sleepers(marker) == []

    run(main)
    assert traces() == before


def test_stopping_twice_at_once_and_again_is_harmless_and_quick(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            began = clock.now()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(box.stop)
                tasks.start_soon(box.stop)
            await box.stop()
            assert clock.now() - began < SOON_S
            for call in (box.probe(1), box.read("x"), box.write("x", b""), box.exec(["true"], timeout_s=1)):
                with pytest.raises(SandboxLostError, match="lost: stopped"):
                    await call

    run(main)


def test_stopping_is_not_cancelled(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.box("sleep", marker) as box:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await box.stop()
            assert sleepers(marker) == []

    run(main)


def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing(kind: Kind, marker: str) -> None:
    before = traces()

    async def main() -> None:
        async with kind.backend() as backend:
            empty = traces()
            for moment_s in (0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2):
                with anyio.move_on_after(moment_s):
                    await (await backend.start(kind.spec("sleep", marker))).stop()
            assert traces() == empty
        assert sleepers(marker) == []

    run(main)
    assert traces() == before


def test_an_agent_that_is_killed_ends_its_box_at_once_and_says_how(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with sleeping(kind, marker) as (box, agent):
            os.kill(agent, signal.SIGKILL)
            with anyio.fail_after(3):
                assert str(await box.wait()) == "killed by signal 9 (SIGKILL)"
            with pytest.raises(SandboxLostError, match=f"{box.id} lost: killed by signal 9"):
                await box.exec(["true"], timeout_s=5)
            await until(lambda: not sleepers(marker))

    run(main)


def test_a_call_for_a_box_that_dies_in_the_same_moment_says_so(kind: Kind, marker: str) -> None:
    async def main() -> None:
        for delay_s in (0.0, 0.001, 0.01):
            async with sleeping(kind, marker) as (box, agent):
                os.kill(agent, signal.SIGKILL)
                await anyio.sleep(delay_s)
                with pytest.raises(SandboxLostError, match="killed by signal 9"):
                    await box.exec(["sleep", marker], timeout_s=20)

    run(main)


def test_an_agent_that_hangs_is_seen_by_probing_and_its_box_can_be_stopped(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with sleeping(kind, marker) as (box, agent):
            os.kill(agent, signal.SIGSTOP)
            began = clock.now()
            with pytest.raises(DeadlineError, match=r"did not answer within 0.2 s"):
                await box.probe(0.2)
            assert clock.now() - began < 2
            await box.stop()
            assert clock.now() - began < 8
            assert sleepers(marker) == []

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PARAMS[0]], indirect=True)  # its time is that of the channel, which all kinds have
def test_a_call_to_an_agent_that_hangs_fails_ten_seconds_late_and_ends_the_box(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with sleeping(kind, marker) as (box, agent):
            os.kill(agent, signal.SIGSTOP)
            began = clock.now()
            with pytest.raises(SandboxLostError, match="lost: it does not answer"):
                await box.exec(["true"], timeout_s=0.5)
            assert 10.5 <= clock.now() - began < 14
            await until(lambda: not sleepers(marker))

    run(main)


def test_a_program_that_attacks_its_agent_does_not_reach_it_or_ends_only_its_own_box(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            if not backend.capabilities()["uid"]:
                pytest.skip("agent and program are one user")
            box = await backend.start(kind.spec("sleep", marker))
            attack = "kill -9 1; kill -STOP 1; kill -9 $PPID; for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done"
            with suppress(SandboxLostError):  # its command is the attacker's to kill
                await box.exec(["bash", "-c", f"trap '' TERM; {attack} 2>/dev/null"], timeout_s=20)
                assert (await box.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"

    run(main)


def test_boxes_are_told_apart_and_do_not_disturb_each_other(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            boxes = [await backend.start(kind.spec()) for _ in range(3)]
            assert len({box.id for box in boxes}) == 3
            assert boxes[0].id.partition("-")[2] == "1"
            for number, box in enumerate(boxes):
                await box.write("file", b"%d" % number)
            await boxes[1].stop()
            assert [await boxes[number].read("file") for number in (0, 2)] == [b"0", b"2"]

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
                box = await backend.start(kind.spec(untrusted=True))
                assert (await box.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"
            bounds = {"memory": ("memory_mib", 64), "pids": ("pids", 50), "cpu": ("cpus", 0.5), "disk": ("disk_mib", 8)}
            for name, (field, value) in bounds.items():
                if not capabilities[name]:
                    with pytest.raises(SandboxRefusedError, match=f"{field}={value} is refused"):
                        await backend.start(kind.spec(**{field: value}))

    run(main)


@pytest.mark.parametrize("field", ["memory_mib", "pids", "cpus", "disk_mib"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_bound_of_nothing_is_refused_since_it_would_mean_none(kind: Kind, field: str, value: int) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            with pytest.raises(SandboxRefusedError, match=f"{field}={value} is refused: it must be more than 0"):
                await backend.start(kind.spec(**{field: value}))

    run(main)


def test_bounds_hold(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            if not all(backend.capabilities()[name] for name in ("memory", "pids", "disk")):
                pytest.skip("not everything is bounded here")
            box = await backend.start(kind.spec(memory_mib=128, pids=40, disk_mib=8))
            for folder in ("/tmp", "/workspace"):
                fill = f"head -c 30000000 /dev/zero > {folder}/x; stat -c %s {folder}/x; rm {folder}/x"
                size = int((await box.exec(["sh", "-c", fill], timeout_s=20)).stdout)
                assert 7 << 20 <= size <= 8 << 20
            forks = "for i in $(seq 100); do sleep 1 & done; jobs -p | wc -l"
            result = await box.exec(["bash", "-c", forks], timeout_s=30)
            assert "Resource temporarily unavailable" in result.stderr
            assert (await box.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"

    run(main)


def test_bubblewrap_is_available_exactly_where_its_boxes_start() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            try:
                await backend.start(SandboxSpec())
            except SandboxStartError:
                assert why_unavailable() is not None
            else:
                assert why_unavailable() is None

    run(main)
