"""Folders that envkit writes, such as runs: their lock, and their format version in ``format.json``.

envkit refuses a folder with another format version, because it would misread the files. A folder without
``format.json`` has format 0.
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
    """Check that a folder has the expected format version. A missing or unused folder is accepted.

    Args:
        folder: The folder.
        expected: Format that this version of envkit reads.
        holds: What the folder contains, for the message, such as ``"a run"``.
        remedy: What the user should do, for the message.
        is_used: Whether the folder contains files. If it does, ``format.json`` must exist.

    Raises:
        UsageError: The format differs or is missing; the message names both formats and the remedy.
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
    """Write the format version atomically, unless the folder already has one.

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
        name: Name of the lock file in it, which contains the process id of the user.
        user: What locks such folders, for the message, such as ``"run"``.
        remedy: What the caller should do if the folder is locked, for the message.

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
    """Return the format version in ``format.json``, or text that says why it is unknown; None without this file."""
    try:
        content = json.loads((folder / FORMAT_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"unknown, since {FORMAT_FILE} cannot be read: {error.strerror or error}"
    except ValueError:
        content = None
    number = content.get("format") if isinstance(content, dict) else None
    return str(number) if type(number) is int else f"unknown, since {FORMAT_FILE} is damaged"
