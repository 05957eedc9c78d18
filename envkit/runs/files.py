"""Files of results: atomic writes, JSON lines that others can read while they grow, errors for failed writes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import orjson

from envkit.errors import EnvkitError, UsageError
from envkit.types import JSON

_NO_SPACE = "free some space and continue from the last checkpoint with --resume"
_NOT_WRITABLE = "make it writable or choose another folder with --output"
_NOT_A_FOLDER = "a file has the name of a folder; choose another folder with --output"
_NO_FOLDER = "choose another folder with --output"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _NO_SPACE),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NOT_WRITABLE),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), _NOT_A_FOLDER),
    **dict.fromkeys((errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP), _NO_FOLDER),
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


def replace(path: Path, content: bytes, *, remedy: str | None = None, mode: int = 0o666) -> None:
    """Write a file atomically: readers see either the old or the new content, even if the process is killed.

    The file gets the permissions `mode`, less the umask. Errors are those of `writing`, with this remedy.
    """
    part = path.with_name(f".{path.name}.part")
    with writing(path, remedy=remedy):
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
                file.write(content)
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


def read_rows(path: Path) -> list[dict[str, JSON]]:
    """Return the objects of a ``.jsonl`` file, without a truncated last line. A missing file has no objects.

    Raises:
        UsageError: The file cannot be read, or a line before the last is not a JSON object.
    """
    with writing(path):
        lines = path.read_bytes().splitlines() if path.exists() else []
    rows: list[dict[str, JSON]] = []
    for number, line in enumerate(lines, 1):
        row = _parsed(line)
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise UsageError(f"{path}: line {number} is damaged; remove it, or start over with --force")
    return rows


def _parsed(line: bytes) -> JSON:
    try:
        return cast("JSON", orjson.loads(line))
    except orjson.JSONDecodeError:
        return None


class Rows:
    """An append-only file of JSON objects, one per line. Writes are not buffered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def append(self, row: Mapping[str, JSON]) -> None:
        rest = memoryview(encoded(row) + b"\n")
        with writing(self._path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()


def replace_rows(path: Path, rows: Iterable[object]) -> None:
    """Write `rows` atomically to the JSON-lines file `path`, replacing an existing file."""
    replace(path, b"".join(encoded(row) + b"\n" for row in rows))


def keep_until(path: Path, step: int) -> None:
    """Rewrite a JSON-lines file without the lines of train steps after `step` and without a truncated last line."""
    replace_rows(path, [row for row in read_rows(path) if isinstance(at := row.get("step"), int) and at <= step])


def encoded(value: object, *, indented: bool = False) -> bytes:
    """Encode `value` as JSON; NumPy values are allowed. Floats are stored exactly, and non-finite values as null.

    Raises:
        TypeError: A value is not JSON, an integer has more than 64 bits, or a text has surrogates.
    """
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indented else 0)
    return orjson.dumps(value, default=plain, option=options)


def plain(value: Any) -> object:
    """Return a JSON-compatible form of a struct, a mapping or a NumPy value.

    Raises:
        TypeError: It is another value.
    """
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return cast("object", value.tolist())
    raise TypeError(f"{type(value).__name__} is not a JSON type")
