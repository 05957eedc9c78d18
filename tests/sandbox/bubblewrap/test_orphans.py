"""What bubblewrap leaves when it is killed before the sandbox has begun: a real one, held up at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.runs import owners
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.bubblewrap.supervisor import find_orphans, reap_orphans
from tests.contract.kinds import arguments, until

pytestmark = [
    pytest.mark.alone,  # every backend of the machine reaps
    pytest.mark.bwrap,
]


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def name_of_one_gone() -> str:
    with subprocess.Popen(["sleep", "60"]) as process:
        name = owners.owner_name(process.pid)
        process.kill()
    return f"{name}-abcdefgh-bwrap-1"


@contextmanager
def begun(name: str) -> Iterator[tuple[int, int]]:
    """Numbers of a bubblewrap, which waits to say which process becomes the sandbox, and of that process."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    options = ["--unshare-pid", "--die-with-parent", "--dev-bind", "/", "/", "--info-fd", str(writer), "sleep", "60"]
    bubblewrap = subprocess.Popen(
        [name, *options], executable="bwrap", env={}, pass_fds=[writer], start_new_session=True
    )
    os.close(writer)
    try:
        while not (found := children(bubblewrap.pid)):
            os.sched_yield()
        yield bubblewrap.pid, found[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(bubblewrap.pid, signal.SIGKILL)
        bubblewrap.wait()
        os.close(reader)


def test_the_next_owner_ends_what_waits_for_a_bubblewrap_that_was_killed() -> None:
    async def main() -> None:
        with begun(name_of_one_gone()) as (bubblewrap, sandbox):
            assert bubblewrap not in find_orphans()
            kill(bubblewrap)
            await anyio.sleep(0.2)
            assert arguments(sandbox)  # nobody else ends it
            assert sandbox in find_orphans()
            async with LocalBackend():
                await until(lambda: not arguments(sandbox))

    clock.run(main)


def test_what_another_owner_has_begun_is_left_alone() -> None:
    with begun(f"{owners.owner_name(os.getpid())}-abcdefgh-bwrap-1") as (bubblewrap, sandbox):
        kill(bubblewrap)
        assert sandbox not in reap_orphans()
        assert arguments(sandbox)
