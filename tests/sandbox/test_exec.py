"""Running a command beside a box's own: its result, its bounds, and that it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxLostError
from envkit.sandbox.local import LocalBackend
from envkit.sandbox.process import ProcessBackend
from envkit.types import ExecResult, SandboxSpec

BackendClass: TypeAlias = type[LocalBackend] | type[ProcessBackend]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await main()

    clock.run(bounded)


async def results(backend_class: BackendClass, *commands: str, timeout_s: float = 20) -> list[ExecResult]:
    async with backend_class() as backend:
        box = await backend.start(SandboxSpec(("sleep", "1000")))
        return [await box.exec(["sh", "-c", command], timeout_s=timeout_s) for command in commands]


def test_output_and_exit_code_are_the_programs(backend_class: BackendClass) -> None:
    async def main() -> None:
        (result,) = await results(backend_class, "echo out; echo err >&2; exit 5")
        assert (result.exit_code, result.stdout, result.stderr) == (5, "out\n", "err\n")
        assert not result.timed_out
        assert not result.truncated

    run(main)


def test_a_signal_is_a_negative_exit_code(backend_class: BackendClass) -> None:
    async def main() -> None:
        codes = [
            result.exit_code
            for result in await results(backend_class, "kill -TERM $$", "kill -KILL $$", "kill -ABRT $$")
        ]
        assert codes == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGABRT]

    run(main)


def test_a_program_that_does_not_exist_is_a_result(backend_class: BackendClass) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))
            result = await box.exec(["no-such-program", "x"], timeout_s=20)
            assert result.exit_code == 127
            assert "no-such-program: No such file or directory" in result.stderr

    run(main)


def test_standard_input_is_empty_and_descriptors_of_ours_are_not_inherited(backend_class: BackendClass) -> None:
    async def main() -> None:
        show = "import os, sys; print(sorted(os.listdir('/proc/self/fd')), repr(sys.stdin.read()))"
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))
            result = await box.exec([sys.executable, "-c", show], timeout_s=20)
            assert result.stdout == "['0', '1', '2', '3'] ''\n"  # 3 is what lists them

    run(main)


def test_of_too_much_output_the_end_is_kept(backend_class: BackendClass) -> None:
    async def main() -> None:
        (result,) = await results(backend_class, "head -c 3000000 /dev/zero | tr '\\0' x; echo the end")
        assert result.truncated
        assert len(result.stdout) == 1 << 20
        assert result.stdout.endswith("xxx" + "the end\n")

    run(main)


def test_undecodable_output_is_replaced(backend_class: BackendClass) -> None:
    async def main() -> None:
        (result,) = await results(backend_class, "printf 'a\\377b'")
        assert result.stdout == "a\N{REPLACEMENT CHARACTER}b"

    run(main)


def test_arguments_arrive_as_they_are_also_when_they_are_large(backend_class: BackendClass) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))
            arguments = ["two words", "", "\N{SNOWMAN}\n", "x" * 100_000]
            show = "import sys; print(repr(sys.argv[1:]))"
            result = await box.exec([sys.executable, "-c", show, *arguments], timeout_s=20, env={"PYTHONUTF8": "1"})
            assert result.stdout == f"{arguments!r}\n"

    run(main)


def test_an_argument_with_nul_is_refused(backend_class: BackendClass) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))
            with pytest.raises(ValueError, match="cannot hold NUL"):
                await box.exec(["echo", "a\0b"], timeout_s=20)

    run(main)


def test_a_slow_program_is_ended_with_everything_that_it_started(
    backend_class: BackendClass, marker: str, sleepers: Callable[[], int]
) -> None:
    async def main() -> None:
        stubborn = f"trap '' TERM HUP INT; echo begun; (setsid sleep {marker} &) & sleep {marker}"
        began = clock.now()
        (result,) = await results(backend_class, stubborn, timeout_s=0.5)
        assert (result.exit_code, result.timed_out, result.stdout) == (None, True, "begun\n")
        assert 0.5 <= result.duration_s < 2.5
        assert clock.now() - began < 5
        assert sleepers() == 0

    run(main)


def test_what_a_program_leaves_behind_is_ended_too_and_does_not_hold_the_answer_back(
    backend_class: BackendClass, marker: str, sleepers: Callable[[], int]
) -> None:
    async def main() -> None:
        (result,) = await results(backend_class, f"setsid sleep {marker} & (sleep {marker} &); echo done")
        assert (result.exit_code, result.stdout) == (0, "done\n")
        assert result.duration_s < 5
        assert sleepers() == 0

    run(main)


def test_a_cancelled_exec_ends_its_program(
    backend_class: BackendClass, marker: str, sleepers: Callable[[], int]
) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))
            with anyio.move_on_after(0.3):
                await box.exec(["sleep", marker], timeout_s=100)
            assert sleepers() == 0
            assert (await box.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"

    run(main)


def test_programs_run_side_by_side(backend_class: BackendClass) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))
            outputs = {}

            async def one(number: int) -> None:
                outputs[number] = (await box.exec(["sh", "-c", f"sleep 0.3; echo {number}"], timeout_s=20)).stdout

            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(one, number)
            assert outputs == {number: f"{number}\n" for number in range(4)}

    run(main)


def test_a_command_for_a_box_that_dies_in_the_same_moment_says_so(backend_class: BackendClass) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            for delay_s in (0.0, 0.001, 0.003, 0.01):
                box = await backend.start(SandboxSpec(("sleep", "1000")))
                os.kill(box.pid, signal.SIGKILL)
                await anyio.sleep(delay_s)
                with pytest.raises(SandboxLostError, match="killed by signal 9"):
                    await box.exec(["sleep", "1000"], timeout_s=20)

    run(main)


def test_a_box_that_dies_ends_what_runs_in_it_with_an_error(
    backend_class: BackendClass, marker: str, sleepers: Callable[[], int]
) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))

            async def kill_soon() -> None:
                while not sleepers():  # noqa: ASYNC110 - it is about another process, which tells nobody
                    await anyio.sleep(0.01)
                os.kill(box.pid, signal.SIGKILL)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill_soon)
                with anyio.fail_after(10), pytest.raises(SandboxLostError, match="killed by signal 9"):
                    await box.exec(["sleep", marker], timeout_s=100)
            assert sleepers() == 0

    run(main)
