"""One promise for every backend: what a box is given, what it may not see, and that nothing is left of it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxLostError, SandboxStartError, UnreachableError
from envkit.sandbox import folders
from envkit.sandbox.box import Box
from envkit.sandbox.local import LocalBackend, why_unavailable
from envkit.sandbox.process import ProcessBackend
from envkit.types import SandboxSpec

BackendClass: TypeAlias = type[LocalBackend] | type[ProcessBackend]

# Answers each connection with what it was sent, in capitals.
SERVER = """
import os, socket
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ["ENVKIT_SOCKETS"] + "/echo.sock")
listener.listen()
while True:
    stream, _ = listener.accept()
    stream.sendall(stream.recv(100).upper())
    stream.close()
"""

# Starts a box of the kind that it is told, says so, and waits for ever; a signal to its group reaches it too.
OWNER = """
import signal, sys, anyio
from envkit.sandbox.local import LocalBackend
from envkit.sandbox.process import ProcessBackend
from envkit.types import SandboxSpec

async def main():
    async with {"LocalBackend": LocalBackend, "ProcessBackend": ProcessBackend}[sys.argv[1]]() as backend:
        box = await backend.start(SandboxSpec(("sh", "-c", "setsid sleep $0 & sleep $0", sys.argv[2])))
        print("ready", flush=True)
        while True:
            await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
            result = await box.exec(["echo", "alive"], timeout_s=10)
            print("interrupted" if interrupted else "", result.stdout, flush=True)

interrupted = []
signal.signal(signal.SIGINT, lambda *_: interrupted.append(1))
anyio.run(main)
"""


@pytest.fixture
def owner(backend_class: BackendClass, marker: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a box, which the test may treat as it likes; `marker` sleeps in the box."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, backend_class.__name__, marker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await main()

    clock.run(bounded)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110 - it is about other processes, which tell nobody
            await anyio.sleep(0.01)


async def talk(box: Box, text: bytes, name: str = "echo.sock") -> bytes:
    while True:
        try:
            stream = await box.connect(name)
            break
        except UnreachableError:  # its server does not listen yet
            await anyio.sleep(0.01)
    with stream:
        stream.sendall(text)
        await anyio.wait_readable(stream)
        return stream.recv(100)


def folders_of(pid: int) -> list[Path]:
    return [folder for root in folders.roots() for folder in root.glob(f"envkit-*-{pid}-*")]


def boxes_of(pid: int) -> list[str]:
    """Names of the folders of the boxes that this process has now."""
    (folder,) = folders_of(pid)
    return [box.name for box in folder.iterdir()]


def program(source: str) -> tuple[str, ...]:
    return (sys.executable, "-c", source)


def test_a_box_is_started_reached_by_its_socket_and_stopped_without_a_trace(backend_class: BackendClass) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(program(SERVER)))
            assert await talk(box, b"hello") == b"HELLO"
            assert await talk(box, b"again") == b"AGAIN"
            await box.stop()
            with pytest.raises(ProcessLookupError):
                os.kill(box.pid, 0)
            assert await box.wait() == "stopped"
            assert boxes_of(os.getpid()) == []
        assert folders_of(os.getpid()) == []

    run(main)


def test_nothing_is_left_of_a_stopped_box_not_even_who_left_its_session(
    backend_class: BackendClass, marker: str, sleepers: Callable[[], int]
) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            command = f"(setsid sleep {marker} &) & trap '' TERM INT HUP; sleep {marker}"
            box = await backend.start(SandboxSpec(("sh", "-c", command)))
            await until(lambda: sleepers() == 2)
            await box.stop()
            assert sleepers() == 0

    run(main)


def test_leaving_the_backend_stops_its_boxes(
    backend_class: BackendClass, marker: str, sleepers: Callable[[], int]
) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            for _ in range(3):
                await backend.start(SandboxSpec(("sleep", marker)))
            await until(lambda: sleepers() == 3)
        assert sleepers() == 0
        assert folders_of(os.getpid()) == []

    run(main)


def test_stopping_twice_at_once_and_again_is_harmless_and_quick(backend_class: BackendClass) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))
            began = clock.now()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(box.stop)
                tasks.start_soon(box.stop)
            await box.stop()
            assert clock.now() - began < 2

    run(main)


def test_a_cancelled_start_leaves_nothing(
    backend_class: BackendClass, marker: str, sleepers: Callable[[], int]
) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            for moment_s in (0.0005, 0.002, 0.005, 0.01, 0.02):
                with anyio.move_on_after(moment_s):
                    await (await backend.start(SandboxSpec(("sleep", marker)))).stop()
            assert boxes_of(os.getpid()) == []
        assert sleepers() == 0

    run(main)


def test_a_box_that_is_killed_says_so_within_two_seconds(
    backend_class: BackendClass, marker: str, sleepers: Callable[[], int]
) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sh", "-c", f"sleep {marker}; true")))
            await until(lambda: sleepers() == 1)
            os.kill(box.pid, signal.SIGKILL)
            with anyio.fail_after(2):
                assert await box.wait() == "killed by signal 9 (SIGKILL)"
            await until(lambda: sleepers() == 0)
            with pytest.raises(SandboxLostError, match=f"{box.id} lost: killed by signal 9"):
                await box.connect("echo.sock")
            with pytest.raises(SandboxLostError, match="killed by signal 9"):
                await box.exec(["true"], timeout_s=5)

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
def test_a_command_that_ends_takes_its_box_with_it_and_leaves_the_cause(
    backend_class: BackendClass, command: str, cause: str
) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sh", "-c", f"sleep 0.2; {command}")))
            assert await box.wait() == cause
            await box.stop()
            assert await box.wait() == cause

    run(main)


def test_a_program_that_does_not_exist_is_a_failed_start(backend_class: BackendClass) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            with pytest.raises(SandboxStartError, match="code 127: no-such-program: "):
                await backend.start(SandboxSpec(("no-such-program",)))
            assert boxes_of(os.getpid()) == []

    run(main)


def test_a_box_whose_bounds_or_hostility_cannot_be_held_is_refused(backend_class: BackendClass) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            assert not all(backend.capabilities().values())
            with pytest.raises(SandboxStartError, match=r"untrusted programs are refused: .*memory, pids"):
                await backend.start(SandboxSpec(("true",), untrusted=True))
            with pytest.raises(SandboxStartError, match="memory_mib=64 is refused"):
                await backend.start(SandboxSpec(("true",), memory_mib=64))

    run(main)


def test_a_box_has_the_environment_of_its_spec_and_none_of_ours(backend_class: BackendClass) -> None:
    async def main() -> None:
        show = program("import json, os; print(json.dumps(dict(os.environ)))")
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000"), env={"COLOUR": "dark blue\n"}))
            found = json.loads((await box.exec(show, timeout_s=20, env={"SIZE": "7"})).stdout)
            assert (found["COLOUR"], found["SIZE"]) == ("dark blue\n", "7")
            assert set(found) - {"TMPDIR"} == {"ENVKIT_SOCKETS", "HOME", "PATH", "LANG", "COLOUR", "SIZE"}

    run(main)


def test_environment_and_options_of_a_box_are_in_no_argument_that_others_could_read(
    backend_class: BackendClass,
) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000"), env={"KEY": "open-sesame"}))
            shown = await anyio.Path(f"/proc/{box.pid}/cmdline").read_bytes()
            assert b"sleep" in shown or b"keeper" in shown
            assert b"open-sesame" not in shown

    run(main)


def test_what_a_box_writes_to_standard_error_is_kept_up_to_a_bound(backend_class: BackendClass) -> None:
    async def main() -> None:
        flood = "import sys; [sys.stderr.write(f'{line:063}\\n') for line in range(5000)]; sys.exit(4)"
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(program(flood)))
            assert await box.wait() == f"exited with code 4: {4999:063}"
            assert len(box.log) == 64 << 10
            assert box.log.startswith(f"{5000 - 1024:063}\n")

    run(main)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_owner_is_killed(
    owner: subprocess.Popen[str], backend_class: BackendClass, sleepers: Callable[[], int], end: signal.Signals
) -> None:
    async def main() -> None:
        await until(lambda: sleepers() == 2)
        owner.send_signal(end)
        assert owner.wait(5) == -end
        await until(lambda: sleepers() == 0)
        assert len(folders_of(owner.pid)) == 1
        async with backend_class():  # the next start clears the folder away
            assert folders_of(owner.pid) == []

    run(main)


def test_an_interrupt_at_the_terminal_does_not_reach_the_boxes(
    owner: subprocess.Popen[str], sleepers: Callable[[], int]
) -> None:
    async def main() -> None:
        await until(lambda: sleepers() == 2)
        os.killpg(owner.pid, signal.SIGINT)
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.write("well?\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "interrupted alive\n"
        assert sleepers() == 2

    run(main)


def test_the_next_owner_leaves_the_folders_of_the_living_alone(
    owner: subprocess.Popen[str], backend_class: BackendClass
) -> None:
    async def main() -> None:
        async with backend_class():
            assert len(folders_of(owner.pid)) == 1

    run(main)


def test_boxes_are_told_apart_and_do_not_disturb_each_other(backend_class: BackendClass) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            boxes = [await backend.start(SandboxSpec(program(SERVER))) for _ in range(3)]
            assert len({box.id for box in boxes}) == 3
            os.kill(boxes[1].pid, signal.SIGKILL)
            await boxes[1].wait()
            assert [await talk(boxes[number], b"ok") for number in (0, 2)] == [b"OK", b"OK"]

    run(main)


def test_bubblewrap_is_available_exactly_where_its_boxes_start() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            try:
                await backend.start(SandboxSpec(("true",)))
            except SandboxStartError:
                assert why_unavailable() is not None
            else:
                assert why_unavailable() is None

    run(main)


def test_ids_are_counted_by_each_backend() -> None:
    async def main() -> None:
        async with ProcessBackend() as backend:
            boxes = [await backend.start(SandboxSpec(("sleep", "1000"))) for _ in range(2)]
        assert [box.id for box in boxes] == [f"process-{number}" for number in itertools.islice(itertools.count(1), 2)]

    run(main)
