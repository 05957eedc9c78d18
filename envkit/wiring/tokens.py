"""Where a machine's tokens are, for the server and for the commands."""

from __future__ import annotations

import os
from pathlib import Path

from envkit.http.tokens import TokenStore

_FILE = "tokens.sqlite"


def state_folder(chosen: Path | str | None = None) -> Path:
    """Return the folder of what outlives a server: the chosen one, or the user's own."""
    if chosen is not None:
        return Path(chosen).expanduser()
    by_variable = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = by_variable if by_variable.is_absolute() else Path("~/.local/state").expanduser()
    return home / "envkit"


def open_tokens(state: Path | str | None = None) -> TokenStore:
    """Open the tokens in a folder of state, making both where they are missing.

    Raises:
        UsageError: They cannot be kept there; the message says why.
    """
    return TokenStore(state_folder(state) / _FILE)
