"""Files and folders of the host that a sandbox is shown on request, read-only, each at a place of its own."""

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
"""What a sandbox has of its own at the top. Snapshots hold ``/tmp`` and ``/workspace``, and could not be put back."""


def fault_of_views(views: Sequence[tuple[str, str]], shown: Iterable[str] = ()) -> str | None:
    """Return why `SandboxSpec.views` cannot be this, in one line; None where it can.

    Args:
        views: Paths of the host and places inside.
        shown: Places inside that are needed for something else.
    """
    places = [*shown]
    for source, place in views:
        if not source.startswith("/") or "\0" in source:
            return f"{source!r} must be an absolute path of this machine"
        if not (Path(source).is_dir() or Path(source).is_file()):
            return f"there is no file or folder {source!r} on this machine"
        if not place.startswith("/") or posixpath.normpath(place) != place or "\0" in place:
            return f"{place!r} must be an absolute path in the sandbox, without '..' and without a slash at its end"
        if place == "/" or place.split("/")[1] in _TAKEN:
            return f"{place!r} is the sandbox's own (/{', /'.join(_TAKEN)}); choose another place, such as /data"
        for other in places:
            if _is_in(place, other) or _is_in(other, place):
                return f"{place!r} and {other!r} lie one inside the other; choose another place, such as /data"
        places.append(place)
    return None


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
