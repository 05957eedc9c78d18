"""Atomic file writes, and error messages for failed writes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from envkit.errors import EnvkitError, UsageError

_NO_SPACE = "free some space and continue from the last checkpoint with --resume"
_NOT_WRITABLE = "make it writable or choose another folder with --output"
_NOT_A_FOLDER = "a file has the name of a folder; choose another folder with --output"
_NO_FOLDER = "choose another folder with --output"
_ADVICE = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
    errno.EACCES: _NOT_WRITABLE,
    errno.EPERM: _NOT_WRITABLE,
    errno.EROFS: _NOT_WRITABLE,
    errno.EEXIST: _NOT_A_FOLDER,
    errno.ENOTDIR: _NOT_A_FOLDER,
    errno.ENOENT: _NO_FOLDER,
    errno.ENAMETOOLONG: _NO_FOLDER,
    errno.ELOOP: _NO_FOLDER,
}
_QUOTED = re.compile(r"\(os error (\d+)\)")
_OTHERWISE = "fix this, then continue from the last checkpoint with --resume"


@contextmanager
def writing(path: Path, *, remedy: str | None = None) -> Iterator[None]:
    """Convert file system errors in a ``with`` block to a `UsageError` with the path, the reason and a remedy.

    Pass `remedy` for a file outside a run's folder; None selects the standard remedy for a file of a run.
    """
    try:
        yield
    except EnvkitError:
        raise
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        reason = refusal.strerror or str(refusal)
        advice = remedy or _ADVICE.get(refusal.errno or 0, _OTHERWISE)
        raise UsageError(f"{path}: {reason}; {advice}") from error


def _refusal(error: BaseException | None) -> OSError | None:
    """Return the `OSError` that caused `error`.

    torch raises another error while handling the `OSError`. safetensors raises an error whose message contains the
    number of the `OSError`.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error
        if quoted := _QUOTED.search(str(error)):  # library's message: safetensors
            return OSError(int(quoted[1]), os.strerror(int(quoted[1])))
        error = error.__context__
    return None


def replace(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see either the old or the new content, even if the process is killed."""
    part = path.with_name(f".{path.name}.part")
    with writing(path):
        try:
            part.write_bytes(content)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def share_weights(folder: Path) -> None:
    """Give the safetensors files in and below `folder` the permissions of `folder`.

    safetensors writes a temporary file and renames it, so the file has mode 0600 regardless of the umask. Errors from
    file systems without permissions are ignored.
    """
    with suppress(OSError):
        mode = folder.stat().st_mode & 0o666
        for path in folder.rglob("*.safetensors"):
            path.chmod(mode)
