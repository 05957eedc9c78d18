"""Locks and format versions of folders that envkit writes, such as the folders of training runs.

The file ``format.json`` in the folder contains the version; without this file, the version is 0. envkit refuses a
folder with another version than its own, because it would misread the files.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO

from envkit.errors import UsageError

FORMAT_FILE = "format.json"


def require_format(folder: Path, expected: int, *, holds: str, remedy: str, is_used: bool) -> None:
    """Check that a folder has the expected format version. A folder without files of envkit is accepted.

    Args:
        folder: The folder.
        expected: Format version that this version of envkit reads.
        holds: What the folder contains, such as ``"a run"``; part of the error message.
        remedy: What the user should do; part of the error message.
        is_used: Whether the folder contains files that envkit wrote. If so, ``format.json`` must exist.

    Raises:
        UsageError: The version differs or is missing. The message names both versions and the remedy.
    """
    found = _found(folder)
    if found is None and is_used:
        found = f"0, since there is no {FORMAT_FILE}"
    if found not in (None, str(expected)):
        raise UsageError(
            f"{folder}: holds {holds} of another format (found {found}; this version of envkit reads {expected}); "
            f"{remedy}"
        )


def write_format(folder: Path, number: int) -> None:
    """Write `number` as the folder's format version, atomically, unless the folder already has a version.

    Raises:
        OSError: The file cannot be written.
    """
    if (folder / FORMAT_FILE).exists():
        return
    draft = folder / f".{FORMAT_FILE}.{os.getpid()}"
    try:
        draft.write_text(json.dumps({"format": number}) + "\n")
        draft.replace(folder / FORMAT_FILE)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def lock_folder(folder: Path, name: str, *, user: str, remedy: str) -> IO[bytes]:
    """Lock a folder until the returned file is closed or this process ends.

    Args:
        folder: The folder.
        name: Name of the lock file in the folder. The file will contain the id of this process.
        user: What locks such folders, such as ``"run"``; part of the error message.
        remedy: What to do if another process has locked the folder; part of the error message.

    Raises:
        UsageError: Another process has locked the folder.
        OSError: The lock file cannot be opened, locked or written.
    """
    lock = (folder / name).open("a+b", buffering=0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        lock.write(b"%d\n" % os.getpid())
    except BlockingIOError:
        with lock:
            lock.seek(0)
            pid = lock.read().decode(errors="replace").strip() or "unknown"
        raise UsageError(f"{folder}: in use by another {user} (process {pid}); {remedy}") from None
    except OSError:
        lock.close()
        raise
    return lock


def _found(folder: Path) -> str | None:
    """Return the version in ``format.json``, or words that say why it is unknown; None if the file is missing."""
    try:
        content = json.loads((folder / FORMAT_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"unknown, since {FORMAT_FILE} cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError):
        content = None
    number = content.get("format") if isinstance(content, dict) else None
    return str(number) if type(number) is int else f"unknown, since {FORMAT_FILE} is damaged"
