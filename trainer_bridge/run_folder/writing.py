"""Writing of files that the file system may refuse, or that a kill may interrupt."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from envkit.errors import EnvkitError, UsageError

_NO_SPACE = "free some space and go on from the last checkpoint with --resume"
_NOT_OURS = "make it writable or choose another folder with --output"
_IN_THE_WAY = "a file stands where a folder is needed; choose another folder with --output"
_NO_FOLDER = "choose another folder with --output"
_ADVICE = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
    errno.EACCES: _NOT_OURS,
    errno.EPERM: _NOT_OURS,
    errno.EROFS: _NOT_OURS,
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.ENOENT: _NO_FOLDER,
    errno.ENAMETOOLONG: _NO_FOLDER,
    errno.ELOOP: _NO_FOLDER,
}
_QUOTED = re.compile(r"\(os error (\d+)\)")
_OTHERWISE = "once that is mended, go on from the last checkpoint with --resume"


@contextmanager
def writing(path: Path, *, remedy: str | None = None) -> Iterator[None]:
    """Turn what the file system refuses in the block into a `UsageError`: path, reason, what to do.

    `remedy` says what to do where nothing of a run is written; None takes the usual advice for a run's folder.
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
    """Return the `OSError` that is behind `error`.

    torch raises another error while it handles the system's own; safetensors only quotes its number.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error
        if quoted := _QUOTED.search(str(error)):  # library's message: safetensors
            return OSError(int(quoted[1]), os.strerror(int(quoted[1])))
        error = error.__context__
    return None


def replace(path: Path, content: bytes) -> None:
    """Write a file so that readers, and a kill, find it whole."""
    part = path.with_name(f".{path.name}.part")
    with writing(path):
        try:
            part.write_bytes(content)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def share_weights(folder: Path) -> None:
    """Make the safetensors files in and below `folder` readable by whoever may read `folder`.

    The library writes a temporary file and renames it, which leaves mode 0600 whatever the umask is. A file system that
    knows no modes is left as it is.
    """
    with suppress(OSError):
        mode = folder.stat().st_mode & 0o666
        for path in folder.rglob("*.safetensors"):
            path.chmod(mode)
