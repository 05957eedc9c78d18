"""Source distributions and test environments, which pip downloads once into a folder of this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from envkit.errors import UsageError

PYTEST = ("pytest==8.4.2", "pluggy==1.6.0", "iniconfig==2.3.0", "packaging==25.0", "pygments==2.19.2")
"""The environment of tests that need nothing but pytest."""


def prepare(folder: Path, announce: Callable[[str], None]) -> None:
    """Install the environment of the tests that need nothing but pytest; the builder of ``envkit data swe``."""
    environment(PYTEST, folder / "environments", announce)


def fetch(requirement: str, folder: Path) -> Path:
    """Return the source distribution of a requirement such as ``semver==3.1.1``, downloaded by pip if it is missing.

    Raises:
        UsageError: pip failed; the message has its last line.
    """
    name, _, version = requirement.partition("==")
    if not version:
        raise UsageError(f"{requirement!r} must name an exact version, such as semver==3.1.1")
    found = [one for one in folder.glob("*.tar.gz") if _is_sdist_of(one.name, name, version)]
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _pip("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", scratch, requirement)
        made = next(iter(Path(scratch).glob("*.tar.gz")), None)
        if made is None:
            raise UsageError(f"{requirement} has no source distribution as .tar.gz")
        return made.rename(folder / made.name)


def requirement_of(base: str) -> str:
    """Return the requirement of a source distribution, given its file name such as ``semver-3.1.1.tar.gz``."""
    name, _, version = base.removesuffix(".tar.gz").rpartition("-")
    return f"{name}=={version}"


def unpack(base: Path, folder: Path) -> Path:
    """Return the tree of a source distribution, unpacked once as a subfolder of `folder`."""
    target = folder / base.name.removesuffix(".tar.gz")
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            with tarfile.open(base) as archive:
                archive.extractall(scratch, filter="data")
            put(next(iter(Path(scratch).iterdir())), target)
    return target


def environment(requirements: Sequence[str], folder: Path, announce: Callable[[str], None]) -> Path:
    """Return the folder with installed requirements, a subfolder of `folder` that pip fills once.

    Raises:
        UsageError: pip failed; the message has its last line.
    """
    name = hashlib.sha256("\n".join(sorted(requirements)).encode()).hexdigest()[:16]
    target = folder / name
    if not target.is_dir():
        announce(f"installing the environment of the tests: {', '.join(requirements)}")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _pip("install", "--no-deps", "--only-binary", ":all:", "--target", f"{scratch}/made", *requirements)
            put(Path(scratch) / "made", target)
    return target


def sha256_of(file: Path) -> str:
    """Return the SHA-256 hash of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _is_sdist_of(file: str, name: str, version: str) -> bool:
    stem = file.removesuffix(f"-{version}.tar.gz")
    return stem != file and stem.lower().replace("_", "-").replace(".", "-") == name.lower().replace("_", "-")


def put(source: Path, target: Path) -> None:
    """Move a finished folder to its place, unless another process has put one there."""
    try:
        source.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(source, ignore_errors=True)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ})
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise UsageError(f"pip failed: {lines[-1] if lines else f'exit code {done.returncode}'}")
