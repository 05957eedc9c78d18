"""Validate views: host files and folders that are bind-mounted read-only into a sandbox."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from pathlib import Path

_TAKEN = (
    "bin",
    "dev",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "proc",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr",
    "workspace",
)
"""Top-level directories of a sandbox in which views are not allowed. In ``/tmp`` and ``/workspace``, a snapshot would
copy the views, but could not restore them.
"""


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
        if place == "/" or place.split("/")[1] in _TAKEN:
            return f"{place!r} is reserved for the sandbox (/{', /'.join(_TAKEN)}); choose another path, such as /data"
        for other in places:
            if _is_in(place, other) or _is_in(other, place):
                return f"{place!r} and {other!r} overlap; choose another path, such as /data"
        places.append(place)
    return None


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
