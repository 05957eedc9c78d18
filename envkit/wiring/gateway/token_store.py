"""The state folder of a server: its format, its lock and its tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from envkit.errors import UsageError
from envkit.http.auth.tokens import TokenStore
from envkit.runs.folder import lock_folder, require_format, write_format

STATE_FORMAT = 1
"""Format number of the folder. Increase it when older versions would misread the files."""

LEDGER = "fleet-{}.sqlite"
"""File name of a server's ledger, in which ``{}`` stands for the server's address."""

JOINED = "nodes-{}.json"
"""Like `LEDGER`, the name of the file with the nodes that have joined, and their tokens."""

_FILE = "tokens.sqlite"
_LOCK = "server.lock"


def state_folder(chosen: Path | str | None = None) -> Path:
    """Return the state folder: `chosen`, or the default folder of the user."""
    if chosen is not None:
        return Path(chosen).expanduser()
    by_variable = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = by_variable if by_variable.is_absolute() else Path("~/.local/state").expanduser()
    return home / "envkit"


def open_tokens(state: Path | str | None = None) -> TokenStore:
    """Open the token store in a state folder; create the folder and the store if they do not exist.

    Raises:
        UsageError: The folder has another format or cannot be written; the message says why.
    """
    return TokenStore(_open_folder(state) / _FILE)


def lock_state(state: Path | str | None = None) -> IO[bytes]:
    """Lock a state folder for one server, until the returned file is closed or this process ends.

    Raises:
        UsageError: Another server holds the lock, the folder has another format, or it cannot be locked.
    """
    folder = _open_folder(state)
    try:
        return lock_folder(folder, _LOCK, user="server", remedy="stop it or choose another folder (--state)")
    except OSError as error:
        raise _unusable(folder, error) from None


def _open_folder(state: Path | str | None) -> Path:
    """Return the state folder; create it with its format number if it does not exist."""
    folder = state_folder(state)
    is_used = (folder / _FILE).exists() or any(folder.glob(LEDGER.format("*")))
    remedy = "start the version of envkit that wrote it, move it away, or choose another folder (--state)"
    require_format(folder, STATE_FORMAT, holds="a server's state", remedy=remedy, is_used=is_used)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_format(folder, STATE_FORMAT)
    except OSError as error:
        raise _unusable(folder, error) from None
    return folder


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{folder} cannot be used: {error.strerror or error}; choose a folder that can be written (--state)"
    )
