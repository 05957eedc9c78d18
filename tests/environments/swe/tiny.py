"""A tiny package with a bug, as a source distribution and tasks, and an environment with the pytest of this process."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from envkit.environments.swe.checkout import between
from envkit.environments.swe.packages import folder_of, sha256_of
from envkit.environments.swe.tasks import Lock, LockedPackage, SweTask, write_folder

BASE = "tiny-1.0.tar.gz"
CORE = "src/tiny/core.py"
SOURCE = '''"""Arithmetic."""


def add(first, second):
    """Return the sum."""
    return first + second


def double(value):
    return 2 * value
'''
FIXED = SOURCE.encode()
BUGGY = SOURCE.replace("first + second", "first - second").encode()
TESTS = """
import unittest
import pytest
from tiny.core import add, double

@pytest.mark.parametrize("name", ["a b", "[c]", "x::y", "\\u00fc\\u2192", "", "tab\\t"])
def test_names(name):
    assert add(len(name), 1) == len(name) + 1

def test_double():
    assert double(2) == 4
    assert double(2) != 5  # no object that is equal to everything

class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
"""
FILES = {
    "PKG-INFO": "Name: tiny\nVersion: 1.0\n",
    "pyproject.toml": "[project]\nname = 'tiny'\n",
    "setup.py": "",
    "conftest.py": "",
    "src/tiny/__init__.py": "",
    "src/tiny/data.txt": "data\n",
    CORE: SOURCE,
    "tests/test_core.py": TESTS,
    "tests/helpers.py": "",
}


BUG, FIX = between(CORE, FIXED, BUGGY), between(CORE, BUGGY, FIXED)
NAMES = ("a b", "[c]", "x::y", "\\xfc\\u2192", "", "tab\\t")
FAILING = (*(f"tests/test_core.py::test_names[{name}]" for name in NAMES), "tests/test_core.py::TestAdd::test_add")


def sdist(folder: Path, files: Mapping[str, str] = FILES) -> Path:
    """Write the source distribution below ``folder/sdists``."""
    path = folder / "sdists" / BASE
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"tiny-1.0/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def task(**changes: object) -> SweTask:
    values: dict[str, object] = {
        "id": "tiny.0",
        "repo": "tiny",
        "base": BASE,
        "bug_patch": BUG,
        "patch": FIX,
        "fail_to_pass": FAILING,
        "pass_to_pass": ("tests/test_core.py::test_double",),
        "statements": ("add in src/tiny/core.py is wrong.", "1 + 2 gives -1.", "Tests in tests/test_core.py fail."),
        "file": CORE,
        "function": "add",
    }
    return SweTask(**{**values, **changes})  # type: ignore[arg-type]


def with_tests(folder: Path, tests: str, *, failing: tuple[str, ...], passing: tuple[str, ...] = ()) -> SweTask:
    """Write a source distribution with a file of tests, and return its task. The ids lack the file."""
    sdist(folder, {**FILES, "tests/test_x.py": tests})
    ids = [tuple(f"tests/test_x.py::{name}" for name in names) for names in (failing, passing)]
    return task(fail_to_pass=ids[0], pass_to_pass=ids[1])


def task_folder(folder: Path, *tasks: SweTask, environment: tuple[str, ...] = ("pytest==0",)) -> Path:
    """Write a folder of tasks, for source distributions in ``folder/swe``."""
    base = sdist(folder / "swe")
    package = LockedPackage(
        requirement="", base=BASE, sha256=sha256_of(base), licence="MIT", tests=len(FAILING) + 1, suite_s=0.5
    )
    lock = Lock(command="", environment=environment, packages=(package,))
    write_folder(folder / "tasks", tasks or (task(),), lock)
    place = folder_of(environment, folder / "swe" / "environments")
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.symlink_to(environment_folder(), target_is_directory=True)
    return folder / "tasks"


@lru_cache
def environment_folder() -> Path:
    """Return a folder with the pytest of this process and what it needs."""
    folder = TemporaryDirectory(prefix="envkit-pytest-")
    _FOLDERS.append(folder)
    Path(folder.name).chmod(0o755)
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        place = Path(str(import_module(name).__file__)).parent
        shutil.copytree(place, Path(folder.name) / name)
    shutil.copy(Path(pytest.__file__).parent.parent / "py.py", folder.name)
    return Path(folder.name)


_FOLDERS: list[TemporaryDirectory[str]] = []
