"""Format numbers of folders: which form of files a folder holds, in its file ``format.json``.

A folder of another format is refused, because its files would be misread. Files without a number are older than format
numbers, and count as format 0.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from envkit.errors import UsageError

FORMAT_FILE = "format.json"


def require_format(folder: Path, expected: int, *, holds: str, remedy: str, is_used: bool) -> None:
    """Refuse a folder of another format; one that is missing or not used yet passes.

    Args:
        folder: Where the number is.
        expected: Number of the format that this version of envkit reads.
        holds: What the folder holds, for the message, such as ``"a run"``.
        remedy: What to do, for the message.
        is_used: Whether there are files that would be read; they need a number.

    Raises:
        UsageError: It has another number, or none although it is used; names both numbers and the remedy.
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
    """Write the number into a folder that has none, atomically.

    Raises:
        OSError: It cannot be written.
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


def _found(folder: Path) -> str | None:
    """Return the number as it is shown, or what is wrong with it; None if there is none."""
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
