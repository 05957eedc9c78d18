"""Make a virtual environment from cached layers: ``cached_venv.py [--constraint FILE] FOLDER LAYER...``.

A LAYER is one ``pip install``: a requirement (``torch``), ``.[EXTRA,...]`` for the requirements
of this project with these extras, or ``@FILE`` for a file of requirements. The project itself is not in a layer: it is
installed only in FOLDER, as editable. Its build requirements are the first layer, so a filled cache needs no network.
FILE has the exact versions of packages, as for pip.

Layers are kept in ``$ENVKIT_CACHE/venvs``, or ``~/.cache/envkit/venvs``. The name of a layer is a hash of the
interpreter, pip's environment variables, the versions in FILE, and all requirements up to this layer. A layer is built
under a lock, in a temporary folder that is renamed when the layer is
complete. Then layers that were not used for 60 days are removed. The files in FOLDER are hard links to those of the
last layer (copies on another file system), so do not edit them in place; pip replaces files instead of editing them.
If FOLDER already contains an environment, pip updates it. If the cache is not writable, FOLDER is made without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PROJECT = re.compile(r"\.(?:\[([\w,-]+)\])?")
_EDITABLE = "editables~=0.3"  # hatchling also requires this to install a project as editable
_MAX_FIRST_LINE = 127  # bytes of a program's first line that every Linux reads
_UNUSED_S = 60 * 24 * 3600
_EXTRA = re.compile(r"envkit\[([\w,-]+)\]")


def main(folder: Path, layers: list[str], constraints: Path | None = None) -> None:
    """Make or update the environment in `folder`. Processes that use the same folder wait for each other."""
    versions = [] if constraints is None else ["--constraint", str(constraints.resolve())]
    wanted = [[*versions, *_requirements(layer)] for layer in layers]
    editable = any(_PROJECT.fullmatch(layer) for layer in layers)
    if editable:
        wanted.insert(0, [*versions, *_pyproject()["build-system"]["requires"], _EDITABLE])
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".lock"):
        if (folder / "bin" / "python").exists():
            for requirements in wanted:
                _pip_install(folder, requirements)
        else:
            _remove_remains(folder)
            _make(folder, wanted)
        if editable:
            projects = [ROOT, *([ROOT / "cheats"] if ".[dev]" in layers else [])]
            sources = [word for project in projects for word in ("--editable", str(project))]
            _pip_install(folder, ["--no-build-isolation", "--no-deps", *sources])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file `path` during the block; wait while another process has locked it."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(lock.fileno())
        yield


def _requirements(layer: str) -> list[str]:
    """Return pip's arguments for a layer, without this project itself."""
    if layer.startswith("@"):
        lines = Path(layer[1:]).read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line and not line.startswith("#")]
    if (project := _PROJECT.fullmatch(layer)) is None:
        return [layer]
    table = _pyproject()["project"]
    extras, found = (project[1] or "").split(","), set(table["dependencies"])
    while extras:
        for requirement in table["optional-dependencies"].get(extras.pop(), ()):
            if own := _EXTRA.fullmatch(requirement):
                extras += own[1].split(",")
            else:
                found.add(requirement)
    return sorted(found)


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _make(folder: Path, layers: list[list[str]]) -> None:
    """Link the environment from the cache, or install it into `folder` if the cache cannot be written."""
    cache = Path(os.environ.get("ENVKIT_CACHE") or Path("~/.cache/envkit").expanduser()).resolve() / "venvs"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        print(f"cannot write the cache {cache} ({error.strerror}); installing without it", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for requirements in layers:
            _pip_install(folder, requirements)
    else:
        _link(_cached(cache, layers), folder)


def _cached(cache: Path, layers: list[list[str]]) -> Path:
    """Return the cached environment with all `layers`; build it if it is missing."""
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_"))
    words = [_content(word) for layer in layers for word in (*layer, "")]
    recipe = repr((sys.version, sys.base_prefix, platform.machine(), settings, words))
    folder = cache / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    with _locked(folder.with_suffix(".lock")):
        if not folder.exists():
            building = folder.with_suffix(".new")
            shutil.rmtree(building, ignore_errors=True)
            if layers:
                _link(_cached(cache, layers[:-1]), building)
                _pip_install(building, layers[-1])
            else:
                subprocess.run([sys.executable, "-m", "venv", building], check=True)
            _name_programs(building, folder)
            building.rename(folder)
            _remove_unused(cache, folder.with_suffix(".lock").stat().st_mtime - _UNUSED_S)
    return folder


def _content(word: str) -> str:
    """Return what a word of pip's arguments stands for: the content of a file of constraints, otherwise itself."""
    return Path(word).read_text(encoding="utf-8") if Path(word).is_absolute() else word


def _remove_unused(cache: Path, since_s: float) -> None:
    """Remove each layer whose lock was last taken before `since_s` (seconds since 1970). The lock files remain."""
    for path in cache.glob("*.lock"):
        if path.stat().st_mtime < since_s:
            for suffix in ("", ".new"):
                shutil.rmtree(path.with_suffix(suffix), ignore_errors=True)


def _pip_install(folder: Path, arguments: list[str]) -> None:
    pip = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *arguments], check=True)


def _remove_remains(folder: Path) -> None:
    """Remove the broken virtual environment in `folder`, but not other virtual environments in its subfolders."""
    (folder / "pyvenv.cfg").unlink(missing_ok=True)
    for name in ("bin", "lib"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """Link the files of the environment in `source` into `target`.

    The link `python` is made last, since an environment that has it counts as complete.
    """
    for place, folders, names in os.walk(source):
        if Path(place) != source / "bin":
            names += [name for name in folders if Path(place, name).is_symlink()]
            _link_files(Path(place), target / Path(place).relative_to(source), names)
    # Packages may also put a module into `bin`, so pip makes the folder __pycache__ there.
    programs = [path.name for path in (source / "bin").iterdir() if path.name != "python" and not path.is_dir()]
    _link_files(source / "bin", target / "bin", programs)
    _name_programs(target, target, source)
    _link_files(source / "bin", target / "bin", ["python"])


def _link_files(source: Path, target: Path, names: list[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        (target / name).unlink(missing_ok=True)  # left by an interrupted run, or made by venv (the link lib64)
        try:
            os.link(source / name, target / name, follow_symlinks=False)
        except OSError:  # `source` is on another file system
            shutil.copy2(source / name, target / name, follow_symlinks=False)


def _name_programs(folder: Path, new: Path, old: Path | None = None) -> None:
    """Replace the path `old` (by default `folder`) with `new` in the scripts and settings of the environment."""
    old_name, new_name = os.fsencode((old or folder).absolute()), os.fsencode(new.absolute())
    for file in (folder / "pyvenv.cfg", *(folder / "bin").iterdir()):
        content = b"" if file.is_symlink() or file.is_dir() else file.read_bytes()
        if old_name in content and b"\0" not in content[:1024]:
            mode = file.stat().st_mode
            file.unlink()  # it may be a hard link to a file in the cache, which must not change
            file.write_bytes(_runnable(content.replace(old_name, new_name), b"#!" + new_name))
            file.chmod(mode)


def _runnable(program: bytes, start: bytes) -> bytes:
    """Return the text of a program that the kernel can run. Its first line needs a change if it begins with `start`.

    The kernel does not run interpreters whose path contains a space or is long. Like pip, start those with the shell.
    """
    first, _, rest = program.partition(b"\n")
    if not first.startswith(start) or (b" " not in first and len(first) < _MAX_FIRST_LINE):
        return program
    return b"#!/bin/sh\n'''exec' \"%b\" \"$0\" \"$@\"\n' '''\n%b" % (first[2:], rest)


if __name__ == "__main__":
    words = sys.argv[1:]
    constraints = Path(words[1]) if words[:1] == ["--constraint"] else None
    words = words[0 if constraints is None else 2 :]
    if not words:
        sys.exit(__doc__)
    main(Path(words[0]), words[1:], constraints)
