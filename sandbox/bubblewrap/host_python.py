"""Finds the host paths that a sandbox needs to run the host's Python with its installed packages.

These paths are the standard library, the site-packages folders on `sys.path`, and the import packages of editable
installations. Other folders on `sys.path` (the script's folder, the current folder, those in ``PYTHONPATH``, the root
of a project) are never included, because they may contain secrets and hidden answers.
"""

from __future__ import annotations

import importlib.util
import json
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..host import run_dirs

_SYSTEM = tuple(Path(name) for name in ("/usr", "/proc", "/dev", "/sys", "/run"))
"""Paths that every sandbox has."""
_SITES = ("site-packages", "dist-packages")
_OF_VENV = ("bin", "lib", "lib64", "share", "pyvenv.cfg")
"""The only entries of a virtual environment's folder that sandboxes see, as it may be a project's root folder too."""


def import_path() -> list[str]:
    """Return the sandbox's ``PYTHONPATH``: the needed entries of `sys.path` that Python does not add by itself."""
    library = sysconfig.get_path("stdlib")
    by_itself = {library, str(Path(library, "lib-dynload")), *site.getsitepackages()}
    wanted = {*_site_folders(), *(package.parent for package in _packages())}
    return [str(entry) for entry in _entries() if entry in wanted and str(entry) not in by_itself]


def standard_library() -> list[str]:
    """Return a list with the folder that contains Python's own modules; empty if every sandbox has this folder."""
    return [str(path) for path in _outermost([Path(sys.base_prefix)])]


def readable() -> list[str]:
    """Return the host paths that a sandbox needs, at the same paths, for the host's Python. None contains another."""
    wanted = [Path(sys.base_prefix), Path(sys.base_prefix).resolve(), Path(sys.executable).resolve()]
    wanted += [Path(sys.prefix, name) for name in _OF_VENV] if sys.prefix != sys.base_prefix else []
    wanted += [*_site_folders(), *_packages()]
    allowed = [path for path in wanted if path.exists() and not _tells_too_much(path)]
    return [str(path) for path in _outermost(allowed)]


def _entries() -> list[Path]:
    return list(dict.fromkeys(Path(name or ".").absolute() for name in sys.path))


def _site_folders() -> Iterator[Path]:
    yield from (entry for entry in _entries() if entry.name in _SITES and entry.is_dir())


def _packages() -> Iterator[Path]:
    """Yield the paths of the import packages and modules of envkit and of editable distributions."""
    ours = Path(__file__).parents[2]
    yield from _with_links(ours, ours.parent.resolve())
    for folder in _site_folders():
        for file in folder.glob("*.dist-info/direct_url.json"):
            root = _project(file)
            if root is not None:
                for name in _names(Distribution.at(file.parent)):
                    for package in _places(name):
                        if root in package.resolve().parents:
                            # The root itself is excluded, because it may contain secrets.
                            yield from _with_links(package, root)


def _project(direct_url: Path) -> Path | None:
    """Return the project root of the distribution with this ``direct_url.json``; None if it is not editable."""
    try:
        content = json.loads(direct_url.read_text(encoding="utf-8"))
        is_editable = content.get("dir_info", {}).get("editable") is True
        return Path(url2pathname(urlsplit(content["url"]).path)).resolve() if is_editable else None
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _names(found: Distribution) -> set[str]:
    """Return the import names of a distribution from its metadata, or guess them from its name and entry points."""
    listed = found.read_text("top_level.txt")
    if listed:
        return set(listed.split())
    own = found.metadata["Name"].replace("-", "_").replace(".", "_")
    return {own, own.lower(), *(entry.module.partition(".")[0] for entry in found.entry_points)}


def _places(name: str) -> list[Path]:
    """Return the paths of the module or package `name`, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(path) for path in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin is not None and spec.has_location else []


def _with_links(package: Path, root: Path) -> Iterator[Path]:
    """Yield `package`, and the targets of its symbolic links that are inside the project at `root`."""
    yield package
    if package.is_dir():
        targets = (entry.resolve() for entry in package.iterdir() if entry.is_symlink())
        yield from (target for target in targets if root in target.parents)


def _tells_too_much(path: Path) -> bool:
    """Whether `path` contains the home folder, the temporary folder or the sockets of all sandboxes."""
    private = (Path("~").expanduser(), Path(tempfile.gettempdir()), *run_dirs.roots())
    return any(folder.is_relative_to(path) for folder in private)


def _outermost(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield those `paths` that are neither inside another one of `paths` nor inside a folder that every sandbox has."""
    chosen: list[Path] = []
    for path in sorted(set(paths), key=lambda path: (len(path.parts), path)):
        if not any(path.is_relative_to(outer) for outer in (*chosen, *_SYSTEM)):
            chosen.append(path)
            yield path
