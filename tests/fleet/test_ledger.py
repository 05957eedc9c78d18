"""The ledger: the next server reads what was recorded, also after a kill."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.errors import LeaseNotPersistedError, UsageError
from envkit.fleet.ledger import LeaseLedger, SessionRecord
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.types import Phase, SandboxSpec, SandboxState, SandboxView, Task
from tests.keys import key
from tests.sandbox.fake.backend import FakeBackend
from tests.sandbox.pool.pools import past_events

RECORD = SessionRecord("sandbox", "session", Task("Game-v0", 1))


def leased(id: str, state: SandboxState = SandboxState.LEASED, at_s: float = 2.0) -> SandboxView:
    spec = SandboxSpec(("sh", "-c", "x"), env={"A": "ö"}, cpus=0.5, network=("a.example", "b.example"), detached=True)
    phases = (Phase(SandboxState.STARTING, 1.0, ""), Phase(state, at_s, "asked for"))
    return SandboxView(id, f"sandbox-{id}", "here", "team", spec, phases, expires_at_s=7.5)


def kept_in(path: Path) -> Sequence[SandboxView]:
    async def main() -> Sequence[SandboxView]:
        async with LeaseLedger(path) as ledger:
            return ledger.load()

    return clock.run(main)


def save(path: Path, *views: SandboxView) -> None:
    async def main() -> None:
        async with LeaseLedger(path) as ledger, anyio.create_task_group() as tasks:
            for view in views:
                tasks.start_soon(ledger.save, view)

    clock.run(main)


def test_a_sandbox_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "fleet.sqlite"
    save(path, leased("b"), leased("a"))
    assert kept_in(path) == [leased("a"), leased("b")]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_newest_record_counts_and_ended_sandboxes_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    save(path, *(leased("a", at_s=float(second)) for second in range(2, 200)), leased("b"), leased("c"))
    save(path, leased("b", SandboxState.LOST), leased("c", SandboxState.STOPPED))
    assert kept_in(path) == [leased("a", at_s=199.0)]


def test_the_location_of_an_episode_is_recorded_until_it_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    records = {
        name: SessionRecord("sandbox-1", f"session-{name}", Task("Game-v0", 2**80, {"size": 6})) for name in "abc"
    }

    async def main() -> None:
        async with LeaseLedger(path) as ledger:
            for name, record in records.items():
                await ledger.record(key(name), record)
            await ledger.record(key("a", "ann"), records["b"])
            await ledger.forget(key("b", "ann"))
            await ledger.forget(key("b"))
            await ledger.record(key("c"), records["a"])
        async with LeaseLedger(path) as ledger:
            assert [ledger.records.get(key(name)) for name in "abcd"] == [records["a"], None, records["a"], None]
            assert [ledger.records.get(key("a", tenant)) for tenant in ("ann", "bob")] == [records["b"], None]

    clock.run(main)


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """A ledger that cannot write records with the key "bad"."""
    path = tmp_path / "fleet.sqlite"
    save(path)
    with closing(sqlite3.connect(path)) as connection:
        for table in ("sessions", "sandboxes"):
            fault = "when new.id = 'bad' begin select raise(abort, 'database or disk is full'); end"
            connection.execute(f"create trigger fault_of_{table} before insert on {table} {fault}")
    return path


def test_a_failed_write_raises_for_all_its_callers_and_later_writes_succeed(
    faulty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: dict[str, str] = {}

    async def main() -> None:
        async with LeaseLedger(faulty) as ledger:

            async def record(name: str) -> None:
                try:
                    await ledger.record(key(name), RECORD)
                    outcomes[name] = "written"
                except LeaseNotPersistedError as error:
                    outcomes[name] = str(error)

            with anyio.fail_after(30):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(record, "first")
                    await anyio.lowlevel.checkpoint()  # it is being written
                    for name in ("bad", "with it"):
                        tasks.start_soon(record, name)
                await record("later")
                with pytest.raises(LeaseNotPersistedError):
                    await ledger.save(leased("bad"))
                await ledger.save(leased("good"))
        async with LeaseLedger(faulty) as ledger:
            assert set(ledger.records) == {key("first"), key("later")}

    clock.run(main)
    failure = "cannot persist leases (disk full?); retry later"
    assert {record.getMessage() for record in caplog.records} == {
        f"cannot persist leases, write to {faulty} failed: database or disk is full"
    }
    assert outcomes == {"first": "written", "bad": failure, "with it": failure, "later": "written"}
    assert kept_in(faulty) == [leased("good")]


def test_a_pool_continues_when_its_ledger_cannot_write(faulty: Path) -> None:
    async def main() -> None:
        async with (
            LeaseLedger(faulty) as ledger,
            FakeBackend() as backend,
            Pool([Node("n", backend)], ledger=ledger) as pool,
        ):
            with pytest.raises(LeaseNotPersistedError):
                await pool.create("bad", SandboxSpec())
            await pool.create("good", SandboxSpec())
            assert pool.view("good").state is SandboxState.LEASED
            alerts = [event.text for event in await past_events(pool) if event.kind == "ledger"]
            assert alerts[0] == f"sandbox not persisted: {LeaseNotPersistedError()}"

    clock.run(main)


def test_leaving_the_ledger_waits_for_its_write(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"

    async def main() -> None:
        async with anyio.create_task_group() as tasks, LeaseLedger(path) as ledger:
            for name in "abc":
                tasks.start_soon(ledger.record, key(name), RECORD)
                await anyio.lowlevel.checkpoint()
        async with LeaseLedger(path) as ledger:
            assert set(ledger.records) == {key(name) for name in "abc"}

    clock.run(main)


@pytest.mark.parametrize(
    "content", [b"no database at all, and long enough to be looked at" * 9, b"SQLite format 3\0junk"]
)
def test_a_file_that_is_no_ledger_is_rejected_and_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fleet.sqlite"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"is not an envkit ledger|cannot use"):
        kept_in(path)
    assert path.read_bytes() == content


def spoil(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "update sandboxes set spec = '{}}'",
        "update sandboxes set phases = '[]'",
        "update sessions set seed = 'seven'",
        "alter table sessions rename column sandbox to case_",
        "drop table sandboxes",
    ],
)
def test_the_error_about_a_damaged_ledger_names_the_file_and_the_remedy(statement: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"

    async def main() -> None:
        async with LeaseLedger(path) as ledger:
            await ledger.save(leased("a"))
            await ledger.record(key("key"), SessionRecord("a", "1", Task("Game-v0", 7)))

    clock.run(main)
    spoil(path, statement)
    if statement.startswith("drop"):
        assert kept_in(path) == []  # the table is created again
        return
    with pytest.raises(UsageError, match=r"fleet\.sqlite is damaged \(.*\); move it away\. "):
        kept_in(path)


def test_a_file_of_another_version_and_an_unwritable_folder_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    spoil(path, "pragma user_version = 9")
    with pytest.raises(UsageError, match=r"of envkit \(found format 9; this version reads 4\); start that version"):
        kept_in(path)
    for place in (tmp_path, path / "deeper.sqlite"):
        with pytest.raises(UsageError, match=r"cannot persist leases in .*; choose another folder \(--state\)"):
            kept_in(place)


def test_the_id_of_a_ledger_is_unique_and_stable(tmp_path: Path) -> None:
    async def name(path: Path) -> str:
        async with LeaseLedger(path) as ledger:
            return ledger.id

    names = [clock.run(name, tmp_path / file) for file in ("a", "b", "a", "b")]
    assert names[:2] == names[2:]
    assert len(set(names)) == 2
