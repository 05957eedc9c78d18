"""The ledger: what was recorded is there for the next server, however this one ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.errors import UsageError
from envkit.fleet.ledger import Ledger
from envkit.fleet.seats import SeatRecord
from envkit.types import Phase, SandboxSpec, SandboxState, SandboxView, Task

_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_fleet_ledger import leased
from envkit import clock
from envkit.fleet.ledger import Ledger

async def main():
    async with Ledger(Path(sys.argv[1])) as ledger:
        await ledger.save(leased("a"))
        os.kill(os.getpid(), signal.SIGKILL)

clock.run(main)
"""


def leased(id: str, state: SandboxState = SandboxState.LEASED, at_s: float = 2.0) -> SandboxView:
    spec = SandboxSpec(("sh", "-c", "x"), env={"A": "ö"}, cpus=0.5, network=("a.example", "b.example"), stay=True)
    phases = (Phase(SandboxState.STARTING, 1.0, ""), Phase(state, at_s, "asked for"))
    return SandboxView(id, f"box-{id}", "here", "team", spec, phases, expires_at_s=7.5)


def kept_in(path: Path) -> Sequence[SandboxView]:
    async def main() -> Sequence[SandboxView]:
        async with Ledger(path) as ledger:
            return ledger.load()

    return clock.run(main)


def save(path: Path, *views: SandboxView) -> None:
    async def main() -> None:
        async with Ledger(path) as ledger, anyio.create_task_group() as tasks:
            for view in views:
                tasks.start_soon(ledger.save, view)

    clock.run(main)


def test_a_sandbox_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "fleet.sqlite"
    save(path, leased("b"), leased("a"))
    assert kept_in(path) == [leased("a"), leased("b")]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_newest_record_counts_and_what_is_over_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    save(path, *(leased("a", at_s=float(second)) for second in range(2, 200)), leased("b"), leased("c"))
    save(path, leased("b", SandboxState.LOST), leased("c", SandboxState.STOPPED))
    assert kept_in(path) == [leased("a", at_s=199.0)]


def test_what_was_saved_survives_a_killed_server(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", _KILLED, path, Path(__file__).parent], env=environment, check=False)
    assert run.returncode == -signal.SIGKILL
    assert kept_in(path) == [leased("a")]


def test_who_sits_where_is_remembered_until_they_leave(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    seats = {name: SeatRecord("box-1", f"session-{name}", Task("Game-v0", 2**80, {"size": 6})) for name in "abc"}

    async def main() -> None:
        async with Ledger(path) as ledger:
            for key, seat in seats.items():
                await ledger.sit(key, seat)
            await ledger.leave("b")
            await ledger.sit("c", seats["a"])
        async with Ledger(path) as ledger:
            assert [ledger.seat(key) for key in "abcd"] == [seats["a"], None, seats["a"], None]

    clock.run(main)


def test_a_second_server_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"

    async def main() -> None:
        async with Ledger(path) as first:
            with pytest.raises(UsageError, match="another server has"):
                async with Ledger(path):
                    pass
            await first.save(leased("a"))

    clock.run(main)
    assert kept_in(path) == [leased("a")]


@pytest.mark.parametrize(
    "content", [b"no database at all, and long enough to be looked at" * 9, b"SQLite format 3\0junk"]
)
def test_a_file_that_is_something_else_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fleet.sqlite"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"is no ledger of envkit|cannot be used"):
        kept_in(path)
    assert path.read_bytes() == content


def test_a_ledger_is_known_by_a_name_of_its_own_whenever_it_is_opened(tmp_path: Path) -> None:
    async def name(path: Path) -> str:
        async with Ledger(path) as ledger:
            return ledger.id

    names = [clock.run(name, tmp_path / file) for file in ("a", "b", "a", "b")]
    assert names[:2] == names[2:]
    assert len(set(names)) == 2
