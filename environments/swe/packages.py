"""Source distributions and test environments, which pip downloads once into a folder of this machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from envkit.errors import UsageError

PYTEST = ("pytest==9.2.0", "pluggy==1.7.0", "iniconfig==2.3.1", "packaging==26.4", "pygments==2.21.0")
"""The environment of tests that need nothing but pytest."""

OWN = "envkit-intervals==1.0"
"""A small package that envkit contains, for tasks that need no download."""
_OWN_SOURCE = Path(__file__).with_name("own") / "package"

_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*==[0-9][\w.+!]*", re.ASCII)
_PIP_TIMEOUT_S = 900.0
_MAX_TREE = 512 << 20
_DATE = 1_705_320_000
"""Time of all files of a tree, so that it does not tell which of them were changed: 2024-01-15 12:00 UTC."""

_FREEZE = ("freezegun==1.5.5", "python-dateutil==2.9.0.post0", "six==1.17.0")

TESTED_PACKAGES: Mapping[str, Sequence[str]] = {
    "boltons==26.2.0": (),
    "cachetools==8.0.0": (),
    "h11==0.16.0": (),
    "inflection==0.5.1": (),
    "isodate==0.7.2": (),
    "itsdangerous==2.2.0": _FREEZE,
    "lark==1.3.1": (),
    "marshmallow==4.4.0": ("simplejson==4.3.0",),
    "mistune==3.4.0": (),
    "parse==1.22.4": (),
    "python-slugify==9.2.0": ("text-unidecode==1.3",),
    "semver==3.1.1": (),
    "simpleeval==1.0.8": (),
    "sqlparse==0.6.1": (),
    "tabulate==0.10.0": ("numpy==2.3.5", "wcwidth==0.9.4"),
    "tomlkit==0.15.2": (),
    "toolz==1.2.0": (),
    "uritemplate==4.2.0": (),
    "voluptuous==0.16.0": (),
    "webcolors==25.10.0": (),
    "xmltodict==1.0.4": (),
}
"""Packages whose source distribution has tests that pass, with what these import besides pytest."""


def prepare(folder: Path, announce: Callable[[str], None]) -> None:
    """Install the environment of the tests that need nothing but pytest; the builder of ``envkit data swe``."""
    environment(PYTEST, folder / "environments", announce)


def fetch(requirement: str, folder: Path) -> Path:
    """Return the source distribution of a requirement such as ``semver==3.1.1``, downloaded by pip if it is missing.

    Raises:
        UsageError: The requirement is malformed, or pip failed; the message has its last line.
    """
    _check(requirement)
    name, _, version = requirement.partition("==")
    found = [one for one in folder.glob("*.tar.gz") if _is_sdist_of(one.name, name, version)]
    if found and requirement != OWN:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    if requirement == OWN:
        return _pack(_OWN_SOURCE, folder / f"{name}-{version}.tar.gz")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _pip("download", "--no-deps", "--no-binary", name, "--dest", scratch, "--", requirement)
        made = next(iter(Path(scratch).glob("*.tar.gz")), None)
        if made is None:
            raise UsageError(f"{requirement} has no source distribution as .tar.gz")
        return made.rename(folder / made.name)


def requirement_of(base: str) -> str:
    """Return the requirement of a source distribution, given its file name such as ``semver-3.1.1.tar.gz``."""
    name, _, version = base.removesuffix(".tar.gz").rpartition("-")
    return f"{name}=={version}"


def unpack(base: Path, folder: Path) -> Path:
    """Return the tree of a source distribution, unpacked once as a subfolder of `folder`. All files have one date.

    Raises:
        UsageError: The file is no archive of one folder, it is too large, or it has links that lead out of it.
    """
    target = folder / f"{base.name.removesuffix('.tar.gz')}+{sha256_of(base)[:16]}"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            try:
                with tarfile.open(base) as archive:
                    _check_archive(base, archive)
                    _extract(archive, scratch)
            except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
                raise UsageError(f"cannot unpack {base}: {error}") from None
            made = next(Path(scratch).iterdir())
            set_date(made)
            put(made, target)
    return target


def set_date(tree: Path) -> None:
    """Give all files and folders of a tree the same date, which hides the file with the bug."""
    for path in (*tree.rglob("*"), tree):
        os.utime(path, (_DATE, _DATE), follow_symlinks=False)


def environment(requirements: Sequence[str], folder: Path, announce: Callable[[str], None]) -> Path:
    """Return the folder with installed requirements, a subfolder of `folder` that pip fills once.

    Raises:
        UsageError: A requirement is malformed, or pip failed; the message has its last line.
    """
    for requirement in requirements:
        _check(requirement)
    target = folder_of(requirements, folder)
    if not target.is_dir():
        announce(f"installing the environment of the tests: {', '.join(requirements)}")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _pip("install", "--no-deps", "--only-binary", ":all:", "--target", f"{scratch}/made", "--", *requirements)
            put(Path(scratch) / "made", target)
    return target


def folder_of(requirements: Sequence[str], folder: Path) -> Path:
    """Return the subfolder of `folder` for installed requirements. Each version of Python has its own."""
    words = "\n".join([*sorted(requirements), str(sys.implementation.cache_tag)])
    return folder / hashlib.sha256(words.encode()).hexdigest()[:16]


def environment_of(requirements: Sequence[str], more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the requirements of the environment in which the tests of packages such as ``semver==3.1.1`` run.

    `more` are what the tests import besides pytest, if the package is not in `TESTED_PACKAGES`.

    Raises:
        UsageError: A requirement is malformed; or the environment would contain one of the packages, or two versions
            of a package.
    """
    for requirement in (*requirements, *more):
        _check(requirement)
    needed = sorted({*PYTEST, *more, *(one for each in requirements for one in TESTED_PACKAGES.get(_normal(each), ()))})
    names = [_name_of(one) for one in needed]
    if twice := [one for one in needed if names.count(_name_of(one)) > 1]:
        raise UsageError(f"the environment of the tests would need {' and '.join(twice)}; make two folders of tasks")
    for requirement in requirements:
        if _name_of(requirement) in names:
            raise UsageError(f"{requirement} cannot have bugs, because the environment of the tests contains it")
    return tuple(needed)


def licence_of(tree: Path) -> str:
    """Return the licence that the metadata of an unpacked source distribution names; ``unknown`` if it names none."""
    try:
        fields = HeaderParser().parsestr((tree / "PKG-INFO").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return "unknown"
    named = fields["License-Expression"] or (fields["License"] or "").partition("\n")[0]
    if named and named != "UNKNOWN":
        return str(named)
    classes = [one.split(" :: ")[-1] for one in fields.get_all("Classifier", []) if one.startswith("License ::")]
    return ", ".join(classes) or "unknown"


def sha256_of(file: Path) -> str:
    """Return the SHA-256 hash of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _check(requirement: str) -> None:
    """Raise an error for a requirement that pip would read as an option, address or range of versions."""
    if _REQUIREMENT.fullmatch(requirement) is None:
        raise UsageError(f"{requirement!r} must name an exact version, such as semver==3.1.1")


def _extract(archive: tarfile.TarFile, folder: str) -> None:
    """Unpack an archive whose entries stay inside `folder`, with our user as the owner.

    Python before 3.11.4, such as Debian 12's, has no extraction filters; there, links are refused.
    """
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return
    for entry in archive:
        path = Path(folder, entry.name).resolve()
        if not (path.is_relative_to(Path(folder).resolve()) and (entry.isfile() or entry.isdir())):
            raise tarfile.ExtractError(f"{entry.name!r} leads out of the folder, or is a link (needs Python 3.11.4)")
        entry.uid, entry.gid, entry.uname, entry.gname = os.getuid(), os.getgid(), "", ""
        entry.mode = entry.mode & 0o755 | 0o600
    archive.extractall(folder)


def _check_archive(base: Path, archive: tarfile.TarFile) -> None:
    size = 0
    folders: set[str] = set()
    for member in archive:
        size += member.size
        folders.update(PurePosixPath(member.name).parts[:1])
        if size > _MAX_TREE or len(folders) > 1:
            raise UsageError(f"{base} must contain one folder, of at most {_MAX_TREE >> 20} MiB")
    if not folders:
        raise UsageError(f"{base} has no files")


def _is_sdist_of(file: str, name: str, version: str) -> bool:
    stem = file.removesuffix(f"-{version}.tar.gz")
    return stem != file and _name_of(stem) == _name_of(name)


def _normal(requirement: str) -> str:
    return f"{_name_of(requirement)}=={requirement.partition('==')[2]}"


def _name_of(requirement: str) -> str:
    return requirement.partition("==")[0].lower().replace("_", "-").replace(".", "-")


def _pack(source: Path, target: Path) -> Path:
    """Write the files of a folder to an archive that has the same bytes each time, and return its path."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for file in sorted(source.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                entry = tarfile.TarInfo(f"{target.name.removesuffix('.tar.gz')}/{file.relative_to(source).as_posix()}")
                entry.size = file.stat().st_size
                archive.addfile(entry, io.BytesIO(file.read_bytes()))
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as made:
        made.write(gzip.compress(content.getvalue(), mtime=0))
    return Path(made.name).replace(target)


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
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UsageError(f"pip did not end within {_PIP_TIMEOUT_S:g} s; check the package index") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        raise UsageError(f"pip failed: {(errors or lines or [f'exit code {done.returncode}'])[-1]}")
