"""What a program inside a box needs in order to run our own Python with everything that is importable here."""

from __future__ import annotations

import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from envkit.sandbox import folders

_SYSTEM = tuple(Path(name) for name in ("/usr", "/proc", "/dev", "/sys", "/run"))
"""What a box has its own of, or has anyway."""


def import_path() -> list[str]:
    """The entries of `sys.path` that a new interpreter would not have by itself, for ``PYTHONPATH``."""
    library = sysconfig.get_path("stdlib")
    by_itself = {library, str(Path(library, "lib-dynload")), *site.getsitepackages()}
    return list(dict.fromkeys(str(entry) for entry in _importable() if str(entry) not in by_itself))


def standard_library() -> list[str]:
    """The folder that must be visible so that our Python runs with nothing but its own modules; none where a box has it
    anyway.
    """
    return [str(path) for path in _outermost([Path(sys.base_prefix)])]


def readable() -> list[str]:
    """The files and folders that must be visible, each at its own place, none inside another.

    Of a checkout of envkit only the packages are listed, not what else lies there.
    """
    package = Path(__file__).parents[1]
    wanted = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]]
    for entry in _importable():
        if entry == package.parent and not entry.is_relative_to(sys.prefix):
            wanted += [package, *(link.resolve() for link in package.iterdir() if link.is_symlink())]
        else:
            wanted.append(entry)
    allowed = [path for path in wanted if path.exists() and not _tells_too_much(path)]
    return [str(path) for path in _outermost(allowed)]


def _importable() -> Iterator[Path]:
    for name in sys.path:
        entry = Path(name or ".").absolute()
        if entry.exists() and not _tells_too_much(entry):
            yield entry


def _tells_too_much(path: Path) -> bool:
    """Whether `path` holds a home or the sockets of all boxes, as it does where a script lies right in the home."""
    private = (Path("~").expanduser(), Path(tempfile.gettempdir()), *folders.roots())
    return any(place.is_relative_to(path) for place in private)


def _outermost(paths: Iterable[Path]) -> Iterator[Path]:
    """Leave out what lies inside another or in what a box has anyway."""
    chosen: list[Path] = []
    for path in sorted(set(paths), key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(outer) for outer in (*chosen, *_SYSTEM)):
            chosen.append(path)
            yield path
