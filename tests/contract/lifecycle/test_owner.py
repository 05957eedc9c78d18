"""One promise for every kind of sandbox: it ends with the process that owns it, and with no other."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from envkit.sandbox.host import run_dirs
from tests.contract.kinds import Kind, arguments, containers, groups_of, run, sleepers, until, volumes
from tests.contract.lifecycle.owners import OWNERS_TOGETHER, Owner, Owners

pytestmark = OWNERS_TOGETHER
CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def owner(owners: Owners, kind: Kind, marker: str) -> Iterator[Owner]:
    """A process with a sandbox, which the test may treat as it likes; `marker` sleeps in the sandbox."""
    with owners.start("talkative", kind, marker) as owner:
        assert owner.lines.readline() == "ready\n"
        yield owner


def names_of_processes() -> Iterator[bytes]:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            yield (arguments(int(process.name)) or [b""])[0]


def named_after(pid: int) -> list[str]:
    """The names of bubblewraps that process `pid` has started, which end a moment after it."""
    return [str(name) for name in names_of_processes() if name.startswith(b"envkit-") and b"-%d-" % pid in name]


def is_over(pid: int, marker: str) -> bool:
    """Whether nothing that process `pid` has started runs any more."""
    return not sleepers(marker) and not named_after(pid)


def left_by(pid: int) -> list[str]:
    """Traces of the sandboxes of process `pid`: processes, folders, notes, mounts, containers in any state, volumes."""
    here = f"-{pid}-"
    found = [str(path) for root in run_dirs.roots() for path in root.glob(f"envkit-*{here}*")]
    found += named_after(pid)
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if here in line]
    return [*found, *containers(pid), *volumes(pid)]


@pytest.mark.slow
def test_of_an_owner_killed_at_any_moment_nothing_is_left_after_one_restart(
    owners: Owners, kind: Kind, marker: str
) -> None:
    moments = random.Random(7)

    async def main() -> None:
        for _ in range(4):
            with owners.start("busy", kind, marker) as owner:
                assert owner.lines.readline() == "ready\n"
                await anyio.sleep(moments.uniform(0.0, 0.7))
                groups = {group for pid in sleepers(marker) for group in groups_of(pid)}
                groups = {group for group in groups if group.parent != CGROUPS}  # of who is just ending
                owner.kill()
            async with kind.backend():
                await until(partial(is_over, owner.pid, marker))
                assert left_by(owner.pid) == []
                assert [group for group in groups if group.exists()] == []

    run(main, timeout_s=300)


def test_an_interrupt_at_the_terminal_does_not_reach_the_sandboxes(owner: Owner, marker: str) -> None:
    async def main() -> None:
        await until(lambda: len(sleepers(marker)) == 2)
        os.killpg(owner.pid, signal.SIGINT)
        assert owner.ask("well?") == "interrupted alive"
        assert len(sleepers(marker)) == 2

    run(main)


def test_the_next_owner_leaves_the_sandboxes_of_the_living_alone(owner: Owner, kind: Kind, marker: str) -> None:
    async def main() -> None:
        await until(lambda: len(sleepers(marker)) == 2)
        async with kind.backend():
            assert len(sleepers(marker)) == 2
            assert len([path for root in run_dirs.roots() for path in root.glob(f"envkit-*-{owner.pid}-*")]) == 1

    run(main)
