"""Ledger: an SQLite file with the sandboxes and sessions of a fleet, so that they survive a restart of the server.

A write returns before the disk has stored the data. If the server crashes, the kernel still stores it. After a power
failure the last writes may be missing, which does no harm, because the failure has also ended all sandboxes.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from envkit import clock
from envkit.errors import LeaseNotPersistedError, UsageError
from envkit.types import Phase, SandboxSpec, SandboxState, SandboxView, Task, TenantKey

_FORMAT = 4
_PHASES_KEPT = 50
_OVER = (SandboxState.LOST, SandboxState.STOPPED)
_SCHEMA = f"""
begin;
create table if not exists sessions (
    tenant text not null, id text not null, sandbox text not null, session text not null, env_id text not null,
    seed text not null, options text not null, primary key (tenant, id)
) without rowid;
create table if not exists sandboxes (
    tenant text not null, id text not null, backend_id text not null, node text not null,
    spec text not null, phases text not null, expires_at_s real, primary key (tenant, id)
) without rowid;
create table if not exists identity (id text not null);
pragma user_version = {_FORMAT};
commit;
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The place where an episode runs. `session` is its id on the env server in the sandbox."""

    sandbox_id: str
    session: str
    task: Task


@dataclass(slots=True, eq=False)
class _WriteBatch:
    """Records that are written in one transaction. When it has `ended`, `is_written` is whether it succeeded."""

    views: dict[TenantKey, SandboxView] = field(default_factory=dict)
    records: dict[TenantKey, SessionRecord | None] = field(default_factory=dict)
    has_writer: bool = False
    is_written: bool = False
    ended: anyio.Event = field(default_factory=anyio.Event)


class LeaseLedger:
    """The ledger of one fleet. Use it with ``async with``. Only one server can use the file at a time.

    Args:
        path: The SQLite file. If it does not exist, it is created with mode 0600.

    Attributes:
        id: Random id of this ledger, which is stored in the file and therefore survives restarts.
        records: In which sandbox and session each recorded episode runs.

    Raises:
        UsageError: On entering: another server uses the file, or the file is damaged or not a ledger.
    """

    def __init__(self, path: Path) -> None:
        self.id: str
        self.records: dict[TenantKey, SessionRecord] = {}
        self._path = path
        self._connection: sqlite3.Connection
        self._next = _WriteBatch()
        self._writing = anyio.Lock()

    async def save(self, view: SandboxView) -> None:
        """Record the state of a sandbox in place of its earlier state. If the sandbox has ended, delete its record.

        Raises:
            LeaseNotPersistedError: The write failed; the log says why. `record` and `forget` raise this error, too.
        """
        self._next.views[view.key] = view
        await self._flush()

    async def record(self, key: TenantKey, record: SessionRecord) -> None:
        """Record in which sandbox and session the episode `key` runs; return when the record is written."""
        self.records[key] = self._next.records[key] = record
        await self._flush()

    async def forget(self, *keys: TenantKey) -> None:
        """Delete the records of the episodes `keys`. A cancelled call still completes the deletion."""
        for key in keys:
            self.records.pop(key, None)
            self._next.records[key] = None
        await self._flush()

    async def _flush(self) -> None:
        """Wait until all records added so far are written: in one batch, by the first task that added one.

        The other tasks go on in the same iteration of the event loop, so that their next calls share a message.
        """
        batch = self._next
        with anyio.CancelScope(shield=True):
            if batch.has_writer:
                await batch.ended.wait()
            else:
                batch.has_writer = True
                try:
                    async with self._writing:
                        self._next = _WriteBatch()
                        await clock.to_thread(_put, self._connection, list(batch.views.values()), batch.records)
                        batch.is_written = True
                except Exception as error:
                    _log.error("cannot persist leases, write to %s failed: %s", self._path, error)
                    if not isinstance(error, sqlite3.Error):
                        raise
                finally:
                    if self._next is batch:  # this task was cancelled while it waited
                        self._next = _WriteBatch()
                    batch.ended.set()
        if not batch.is_written:
            raise LeaseNotPersistedError

    def load(self) -> Sequence[SandboxView]:
        """Return all recorded sandboxes, oldest first. Sandboxes that are known to have ended are not recorded.

        Raises:
            UsageError: The file is damaged.
        """
        with _undamaged(self._path):
            rows = self._connection.execute(
                "select tenant, id, backend_id, node, spec, phases, expires_at_s from sandboxes"
            ).fetchall()
            views = [
                SandboxView(
                    id=id,
                    backend_id=backend_id,
                    node=node,
                    tenant=tenant,
                    spec=msgspec.json.decode(spec, type=SandboxSpec),
                    phases=tuple(msgspec.json.decode(phases, type=list[Phase])),
                    expires_at_s=expires_at_s,
                )
                for tenant, id, backend_id, node, spec, phases, expires_at_s in rows
            ]
            return sorted(views, key=lambda view: view.phases[0].at_s)

    async def __aenter__(self) -> Self:
        self._connection = await clock.to_thread(_open, self._path)
        try:
            # Read the sandboxes now, so that a damaged file is reported before the server starts anything.
            self.load()
            with _undamaged(self._path):
                (self.id,) = self._connection.execute("select id from identity").fetchone()
                rows = self._connection.execute(
                    "select tenant, id, sandbox, session, env_id, seed, options from sessions"
                ).fetchall()
                for tenant, id, sandbox_id, session, env_id, seed, options in rows:
                    self.records[TenantKey(tenant, id)] = SessionRecord(
                        sandbox_id, session, Task(env_id, int(seed), msgspec.json.decode(options))
                    )
        except BaseException:
            self._connection.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            async with self._writing:
                await clock.to_thread(self._connection.close)


@contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    """Convert database and decoding errors of the block to a `UsageError`, which says that the file is damaged."""
    try:
        yield
    except (sqlite3.Error, msgspec.MsgspecError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{path} is damaged ({error}); move it away. Sandboxes of the previous server are then not re-attached "
            "and end by themselves"
        ) from None


def _open(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("r+b").close()
    except OSError as error:
        raise UsageError(
            f"cannot persist leases in {path}: {error.strerror or error}; choose another folder (--state)"
        ) from None
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=0.2)
    try:
        # Lock the file, so that no other server uses it. The kernel releases the lock when this process ends.
        connection.execute("pragma locking_mode = exclusive")
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        (number,) = connection.execute("pragma user_version").fetchone()
        (tables,) = connection.execute("select count(*) from sqlite_master").fetchone()
        if number != _FORMAT and (number or tables):
            raise UsageError(
                f"{path} was written by another version of envkit (found format {number}; this version reads "
                f"{_FORMAT}); start that version, or move the file away, or choose another folder (--state)"
            )
        connection.executescript(_SCHEMA)
        named = "insert into identity select ? where not exists (select 1 from identity)"
        connection.execute(named, (secrets.token_hex(8),))
    except sqlite3.OperationalError as error:
        connection.close()
        if "locked" in str(error):  # library's message: sqlite
            raise UsageError(
                f"{path} is in use by another server; stop it or choose another folder (--state)"
            ) from None
        raise UsageError(f"cannot use {path}: {error}") from None
    except sqlite3.DatabaseError as error:
        connection.close()
        raise UsageError(f"{path} is not an envkit ledger: {error}; move it away") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _put(
    connection: sqlite3.Connection, views: Sequence[SandboxView], records: Mapping[TenantKey, SessionRecord | None]
) -> None:
    over = [view.key for view in views if view.state in _OVER]
    rows = [_row(view) for view in views if view.state not in _OVER]
    with connection:  # commits, or rolls back
        connection.execute("begin")
        connection.executemany("delete from sandboxes where tenant = ? and id = ?", over)
        connection.executemany("insert or replace into sandboxes values (?, ?, ?, ?, ?, ?, ?)", rows)
        gone = [key for key, record in records.items() if record is None]
        connection.executemany("delete from sessions where tenant = ? and id = ?", gone)
        connection.executemany(
            "insert or replace into sessions values (?, ?, ?, ?, ?, ?, ?)",
            [(*key, *_columns(record)) for key, record in records.items() if record is not None],
        )


def _row(view: SandboxView) -> tuple[Any, ...]:
    spec = msgspec.json.encode(asdict(view.spec)).decode()
    phases = msgspec.json.encode(view.phases[-_PHASES_KEPT:]).decode()
    return *view.key, view.backend_id, view.node, spec, phases, view.expires_at_s


def _columns(record: SessionRecord) -> tuple[str, ...]:
    # Store the seed as text, because it may be larger than SQLite's 64-bit integers.
    task = record.task
    return (
        record.sandbox_id,
        record.session,
        task.env_id,
        str(task.seed),
        msgspec.json.encode(dict(task.options)).decode(),
    )
