"""API tokens in one SQLite file, which the server and the command line can use at the same time.

A token has the form ``ek_<id>_<secret>``. The file stores only the SHA-256 hash of the secret. A slow password hash
would cost time on each request and add no security, because the secret has 256 random bits.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

from envkit import clock
from envkit.errors import EnvkitError, UsageError, did_you_mean
from envkit.http.auth.caller import SCOPES, Caller

_log = logging.getLogger(__name__)

FRESH_S = 0.5
"""Seconds for which a valid token is cached. A revoked token is still accepted for at most this time."""

_TOUCH_S = 60.0
"""Minimum seconds between two updates of a token's time of last use."""

_BUSY_S = 5.0
_MAX_TTL_S = 100 * 365 * 86400.0
_TOKEN = re.compile(r"ek_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_WORD = re.compile(r"[A-Za-z0-9._-]{1,32}")
_TABLE = """
CREATE TABLE tokens (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, tenant TEXT NOT NULL, scopes TEXT NOT NULL, secret_sha256 BLOB NOT NULL,
    created REAL NOT NULL, expires REAL, used REAL, revoked REAL
);
CREATE UNIQUE INDEX live_names ON tokens (name) WHERE revoked IS NULL;
"""
_NOT_A_TOKEN_FILE = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CANTOPEN)
"""SQLite's error codes if the path is a folder, or if the file is damaged, not a database, or lacks the table."""
_VIEW = "id, name, tenant, scopes, created, expires, used, revoked"


class TokenView(NamedTuple):
    """The data of a token, without its secret. Times are in seconds since 1970; None means never.

    `used` is the time of the last use, and is updated at most once a minute.
    """

    id: str
    name: str
    tenant: str
    scopes: frozenset[str]
    created: float
    expires: float | None
    used: float | None
    revoked: float | None

    def is_live(self, now: float) -> bool:
        return self.revoked is None and (self.expires is None or now < self.expires)


class TokenStore:
    """The tokens in one file. Many processes may use the file at the same time. Only one thread may use this object.

    Args:
        path: Path of the file. If the file or its folder is missing, it is created, and only its owner gets access.
        fresh_s: Seconds for which `check` caches a valid token.

    Raises:
        UsageError: The file or its folder cannot be used; the message says why.
    """

    def __init__(self, path: Path, *, fresh_s: float = FRESH_S) -> None:
        self._path = path
        self._fresh_s = fresh_s
        self._cached: dict[bytes, tuple[Caller, float]] = {}
        self._is_needed = False
        self._checked_at = -math.inf
        self._opened, self._file = _open(path)

    def create(self, tenant: str, scopes: Iterable[str], name: str | None = None, ttl_s: float | None = None) -> str:
        """Create a token and return its text. The text is not stored, so it cannot be read later.

        Args:
            tenant: Name of the tenant that owns the sessions and sandboxes created with the token: 1 to 32 letters,
                digits, dots, dashes, underscores.
            scopes: What the token allows: names from `envkit.http.auth.caller.SCOPES`.
            name: Display name, with the same characters as `tenant`; by default the id of the token.
            ttl_s: Seconds after which the token expires; None for never.

        Raises:
            UsageError: An argument is not valid, or another token has this name.
        """
        given = frozenset(scopes)
        for what, word in (("tenant", tenant), ("name", name)):
            if word is not None and not _WORD.fullmatch(word):
                raise UsageError(f"{what}: must be 1 to 32 characters from A-Z a-z 0-9 . _ -, got {word!r}")
        for scope in sorted(given - set(SCOPES)):
            raise UsageError(f"scopes: unknown scope {scope!r}{did_you_mean(scope, SCOPES)}")
        if not given:
            raise UsageError(f"scopes: a token needs at least one of {', '.join(SCOPES)}")
        if ttl_s is not None and not 0 < ttl_s <= _MAX_TTL_S:
            raise UsageError(f"ttl: must be above 0 s and at most 100 years, got {ttl_s:g} s")
        id, secret, now = secrets.token_hex(6), secrets.token_urlsafe(32), clock.wall()
        expires = None if ttl_s is None else now + ttl_s
        row = (id, name or id, tenant, ",".join(sorted(given)), _digest(secret), now, expires)
        try:
            with self._translated_errors(UsageError):
                self._database().execute(
                    "INSERT INTO tokens (id, name, tenant, scopes, secret_sha256, created, expires)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    row,
                )
        except sqlite3.IntegrityError:
            raise UsageError(f"a token named {name!r} exists already; choose another name, or revoke it") from None
        return f"ek_{id}_{secret}"

    def revoke(self, id_or_name: str) -> str:
        """Revoke a token and return its id. Servers that use the same file reject the token within `FRESH_S` seconds.

        Raises:
            UsageError: The token does not exist or is already revoked.
        """
        with self._translated_errors(UsageError):
            found = (
                self._database()
                .execute(
                    # If the text is the id of one token and the name of another, revoke the token with the id.
                    "UPDATE tokens SET revoked = ? WHERE revoked IS NULL AND id ="
                    " (SELECT id FROM tokens WHERE revoked IS NULL AND (id = ?2 OR name = ?2) ORDER BY id <> ?2)"
                    " RETURNING id",
                    (clock.wall(), id_or_name),
                )
                .fetchall()
            )
        if not found:
            live = [word for one in self.list() if one.revoked is None for word in {one.id, one.name}]
            raise UsageError(f"there is no token {id_or_name!r} to revoke{did_you_mean(id_or_name, live)}")
        id: str = found[0][0]
        return id

    def list(self) -> Sequence[TokenView]:
        """Return all tokens, including revoked and expired ones, oldest first."""
        with self._translated_errors(UsageError):
            rows = self._database().execute(f"SELECT {_VIEW} FROM tokens ORDER BY created, id").fetchall()
        return [_view(row) for row in rows]

    def is_needed(self) -> bool:
        """Return whether requests need a token. They do if the file contains any token, even a revoked one.

        The result may be up to `fresh_s` seconds old.

        Raises:
            EnvkitError: The file can no longer be read.
        """
        if not self._is_needed and (now := clock.stopwatch()) >= self._checked_at + self._fresh_s:
            with self._translated_errors(EnvkitError):
                self._is_needed = self._database().execute("SELECT 1 FROM tokens LIMIT 1").fetchone() is not None
            self._checked_at = now
        return self._is_needed

    def check(self, text: str) -> Caller | None:
        """Return the caller that the token `text` identifies; None if the token is not valid.

        The result may be up to `fresh_s` seconds old.

        Raises:
            EnvkitError: The file can no longer be read.
        """
        digest, now = _digest(text), clock.stopwatch()
        known = self._cached.get(digest)
        if known is not None and now < known[1]:
            return known[0]
        caller = self._look_up(text)
        if caller is not None:
            self._cached[digest] = caller, now + self._fresh_s
        elif known is not None:
            del self._cached[digest]
        return caller

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look_up(self, text: str) -> Caller | None:
        parts = _TOKEN.fullmatch(text)
        if parts is None:
            return None
        with self._translated_errors(EnvkitError):
            database = self._database()
            row = database.execute(f"SELECT secret_sha256, {_VIEW} FROM tokens WHERE id = ?", (parts[1],)).fetchone()
            if row is None or not hmac.compare_digest(row[0], _digest(parts[2])):
                return None
            view, now = _view(row[1:]), clock.wall()
            if not view.is_live(now):
                return None
            if view.used is None or now - view.used >= _TOUCH_S:
                self._touch(view.id, now)
        return Caller(view.tenant, view.scopes, view.id)

    def _touch(self, id: str, now: float) -> None:
        """Record that a token is used now. Skip this while another process writes to the file, so that no request
        has to wait.
        """
        database = self._database()
        database.execute("PRAGMA busy_timeout = 0")
        with suppress(sqlite3.OperationalError):
            database.execute("UPDATE tokens SET used = ? WHERE id = ?", (now, id))
        database.execute(f"PRAGMA busy_timeout = {_BUSY_S * 1000:.0f}")

    def _database(self) -> sqlite3.Connection:
        """Return the connection to the file. If the file was removed or replaced, open or create the file at the path.

        Tokens that only the old file contained are then no longer valid.
        """
        try:
            is_same = _identity(self._path) == self._file
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self._opened.close()
            self._opened, self._file = _open(self._path)
        return self._opened

    @contextmanager
    def _translated_errors(self, kind: type[EnvkitError]) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except (OSError, sqlite3.Error, UsageError) as error:
            raise kind(f"cannot use the tokens in {self._path}: {error}") from None


def _open(path: Path) -> tuple[sqlite3.Connection, tuple[int, int]]:
    """Open the token file, and create it if missing; return the connection and the file's device and inode numbers."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.parent.stat()
        if folder.st_mode & 0o022 or folder.st_uid not in (os.geteuid(), 0):
            raise UsageError(
                f"tokens are not safe in {path.parent}: other users may write there; run chmod go-w {path.parent}, or "
                "choose another folder (--state)"
            )
        if not path.exists():
            _create(path)
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
            _log.warning(
                "%s was accessible to other users; changed its mode to 600. It contains hashes, not tokens", path
            )
        file = _identity(path)
        database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(f"SELECT {_VIEW} FROM tokens LIMIT 0")
        except BaseException:
            database.close()
            raise
    except OSError as error:
        raise UsageError(
            f"cannot store tokens in {path}: {error.strerror or error}; choose a writable folder (--state)"
        ) from None
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) not in _NOT_A_TOKEN_FILE:  # such as a full disk
            raise UsageError(f"cannot use the tokens in {path}: {error}") from None
        raise UsageError(
            f"{path} is not a token file: {error}; move it away, or choose another folder (--state)"
        ) from None
    return database, file


def _create(path: Path) -> None:
    """Create the token file atomically, so that another process never finds it incomplete."""
    # `mkstemp` creates the file with mode 0600. SQLite creates its journal files with the same mode.
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".tokens-")
    os.close(handle)
    try:
        with closing(sqlite3.connect(draft, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(_TABLE)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        Path(draft).unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()


def _view(row: Sequence[object]) -> TokenView:
    view = TokenView(*row)  # type: ignore[arg-type]
    return view._replace(scopes=frozenset(str(row[3]).split(",")))
