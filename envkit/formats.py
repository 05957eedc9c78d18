"""Format versions of folders, stored in ``format.json``.

A folder of another format is refused, because its files would be misread. Files without a version count as format 0.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from envkit.errors import UsageError

FORMAT_FILE = "format.json"


def require_format(folder: Path, expected: int, *, holds: str, remedy: str, is_used: bool) -> None:
    """Refuse a folder of another format; a missing or unused folder passes.

    Args:
        folder: The folder.
        expected: Format that this version of envkit reads.
        holds: Content of the folder, for the message, such as ``"a run"``.
        remedy: The remedy, for the message.
        is_used: Whether the folder contains files, which then need a format version.

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
    """Write the format version atomically, unless the folder has one.

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


def _found(folder: Path) -> str | None:
    """Return the format version or its problem, as text; None if there is no file."""
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
