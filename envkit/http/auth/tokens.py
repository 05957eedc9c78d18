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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

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
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, tenant TEXT NOT NULL, scopes TEXT NOT NULL, secret_sha256 BLOB NOT NULL,
    created REAL NOT NULL, expires REAL, used REAL, revoked REAL
);
CREATE UNIQUE INDEX IF NOT EXISTS live_names ON tokens (name) WHERE revoked IS NULL;
COMMIT;
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
    """The tokens in one file, which many processes may use at the same time.

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
        _open(path).close()

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
                self._execute(
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
            found = self._execute(
                # If the text is the id of one token and the name of another, revoke the token with the id.
                "UPDATE tokens SET revoked = ? WHERE revoked IS NULL AND id ="
                " (SELECT id FROM tokens WHERE revoked IS NULL AND (id = ?2 OR name = ?2) ORDER BY id <> ?2)"
                " RETURNING id",
                (clock.wall(), id_or_name),
            )
        if not found:
            live = [word for one in self.list() if one.revoked is None for word in {one.id, one.name}]
            raise UsageError(f"there is no token {id_or_name!r} to revoke{did_you_mean(id_or_name, live)}")
        return str(found[0][0])

    def list(self) -> Sequence[TokenView]:
        """Return all tokens, including revoked and expired ones, oldest first."""
        with self._translated_errors(UsageError):
            rows = self._execute(f"SELECT {_VIEW} FROM tokens ORDER BY created, id")
        return [_view(row) for row in rows]

    def is_needed(self) -> bool:
        """Return whether requests need a token. They do if the file contains any token, even a revoked one.

        The result may be up to `fresh_s` seconds old. Raises `EnvkitError` if the file can no longer be read.
        """
        if not self._is_needed and (now := clock.stopwatch()) >= self._checked_at + self._fresh_s:
            with self._translated_errors(EnvkitError):
                self._is_needed = bool(self._execute("SELECT 1 FROM tokens LIMIT 1"))
            self._checked_at = now
        return self._is_needed

    def check(self, text: str) -> Caller | None:
        """Return the caller that the token `text` identifies; None if the token is not valid.

        The result may be up to `fresh_s` seconds old. Raises `EnvkitError` if the file can no longer be read.
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

    def _look_up(self, text: str) -> Caller | None:
        parts = _TOKEN.fullmatch(text)
        if parts is None:
            return None
        with self._translated_errors(EnvkitError):
            rows = self._execute(f"SELECT secret_sha256, {_VIEW} FROM tokens WHERE id = ?", (parts[1],))
            if not rows or not hmac.compare_digest(rows[0][0], _digest(parts[2])):
                return None
            view, now = _view(rows[0][1:]), clock.wall()
            if not view.is_live(now):
                return None
            if view.used is None or now - view.used >= _TOUCH_S:
                with suppress(sqlite3.OperationalError, UsageError):  # do not wait for another process that writes
                    self._execute("UPDATE tokens SET used = ? WHERE id = ?", (now, view.id), busy_s=0.0)
        return Caller(view.tenant, view.scopes, view.id)

    def _execute(self, statement: str, values: Sequence[object] = (), busy_s: float = _BUSY_S) -> Sequence[Any]:
        """Execute a statement and return its rows. The file is opened each time, since it may have been replaced.

        Tokens that only the old file contained are then no longer valid.
        """
        with closing(_open(self._path, busy_s)) as database:
            return database.execute(statement, values).fetchall()

    @contextmanager
    def _translated_errors(self, kind: type[EnvkitError]) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except (OSError, sqlite3.Error, UsageError) as error:
            raise kind(f"cannot use the tokens in {self._path}: {error}") from None


class OneToken:
    """The only token of a server that serves one caller, such as a node. It has the methods that requests need."""

    def __init__(self, text: str) -> None:
        self._digest = _digest(text)

    def is_needed(self) -> bool:
        return True

    def check(self, text: str) -> Caller | None:
        """Return the caller, who may do everything; None if the token is another one."""
        return Caller(token_id="one") if hmac.compare_digest(_digest(text), self._digest) else None


def _open(path: Path, busy_s: float = _BUSY_S) -> sqlite3.Connection:
    """Open the token file, and create it if missing. Wait up to `busy_s` seconds for other processes that write."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.parent.stat()
        if folder.st_mode & 0o022 or folder.st_uid not in (os.geteuid(), 0):
            raise UsageError(
                f"tokens are not safe in {path.parent}: other users may write there; run chmod go-w {path.parent}, or "
                "choose another folder (--state)"
            )
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        file = path.stat()
        if file.st_mode & 0o077:
            path.chmod(0o600)
            _log.warning(
                "%s was accessible to other users; changed its mode to 600. It contains hashes, not tokens", path
            )
        database = sqlite3.connect(path, timeout=busy_s, isolation_level=None)
        try:
            if not file.st_size:
                database.executescript(_TABLE)
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
    return database


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()


def _view(row: Sequence[object]) -> TokenView:
    view = TokenView(*row)  # type: ignore[arg-type]
    return view._replace(scopes=frozenset(str(row[3]).split(",")))
