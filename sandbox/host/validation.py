"""Validate what callers pass: arguments, variables and limits of commands, including their types, and views.

A view is a file or folder of the host that is bind-mounted read-only into a sandbox.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath

_MAX_TIMEOUT_S = 1e9
_MAX_OUTPUT_BYTES = 1 << 32
_OWN = ("bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "tmp", "usr", "workspace")
"""Top-level directories of a sandbox in which views are not allowed. In ``/tmp`` and ``/workspace``, a snapshot would
copy the views, but could not restore them.
"""


def fault_of_words(words: Iterable[object]) -> str | None:
    """Return why `words` cannot be a program and its arguments; None if they are valid."""
    for word in words:
        if not isinstance(word, str):
            return f"{word!r} is not a string"
        if "\0" in word:
            return f"{word!r} contains a NUL character"
    return None


def fault_of_variables(variables: Mapping[str, str]) -> str | None:
    """Return why `variables` cannot be environment variables; None if they are valid."""
    settings: list[tuple[object, object]] = [*variables.items()]
    for name, value in settings:
        if (fault := fault_of_words((name, value))) is not None:
            return fault
        if not name or "=" in str(name):
            return f"{name!r} is not a valid variable name"
    return None


def check_bounds(timeout_s: object, max_output_bytes: object) -> None:
    """Raise `ValueError` unless the timeout and the output limit of a command are numbers in their allowed ranges."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s <= _MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s must be a number of seconds from 0 to {_MAX_TIMEOUT_S:g}, got {timeout_s!r}")
    if type(max_output_bytes) is not int or not 0 <= max_output_bytes <= _MAX_OUTPUT_BYTES:
        raise ValueError(f"max_output_bytes must be an integer from 0 to {_MAX_OUTPUT_BYTES}, got {max_output_bytes!r}")


def fault_of_views(views: Sequence[tuple[str, str]], shown: Iterable[str] = ()) -> str | None:
    """Return in one line why `views` is not a valid `SandboxSpec.views`; None if it is valid.

    Args:
        views: Pairs of a host path and a path inside the sandbox.
        shown: Paths inside the sandbox that are in use, so that views must not overlap them.
    """
    places = [*shown]
    for source, place in views:
        if not source.startswith("/") or "\0" in source:
            return f"{source!r} must be an absolute path of this machine"
        if not (Path(source).is_dir() or Path(source).is_file()):
            return f"{source!r} is not a file or folder on this machine"
        if not place.startswith("/") or posixpath.normpath(place) != place or "\0" in place:
            return f"{place!r} must be an absolute path in the sandbox, without '..' and without a slash at its end"
        if place == "/" or place.split("/")[1] in _OWN:
            return f"{place!r} is reserved for the sandbox (/{', /'.join(_OWN)}); choose another path, such as /data"
        for other in places:
            if PurePath(place).is_relative_to(other) or PurePath(other).is_relative_to(place):
                return f"{place!r} and {other!r} overlap; choose another path, such as /data"
        places.append(place)
    return None
