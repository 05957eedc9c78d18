"""Data of environments: built once on this machine, and read-only in sandboxes.

``envkit data NAME`` builds the data in the cache folder. Sandboxes see it at ``/data/NAME``.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from envkit import registry
from envkit.errors import UsageError, did_you_mean
from envkit.registry import EnvSpec
from envkit.runs.cache import cache_folder, make_once
from envkit.wiring.catalogue import load_catalogue

INSIDE = "/data"
"""Folder in a sandbox that contains the data."""
FOLDER_VARIABLE = "ENVKIT_DATA"
"""Environment variable with the folder that contains the data; set in sandboxes."""


def folder_of(name: str) -> Path:
    """Return the folder of the data `name`, for this process. The folder may not exist."""
    inside = os.environ.get(FOLDER_VARIABLE)
    return (Path(inside) if inside else cache_folder() / "data") / name


class DataFolders(Mapping[str, Path]):
    """The folder of each kind of data of an environment.

    Only the data that the environment looks up must exist. Outside sandboxes, looking up missing data builds it, unless
    it is made from files of the user, or `builds` is False, as in servers, whose clients must not wait for that.

    Raises:
        UsageError: From a lookup: the data was not built; the message has the command that builds it.
    """

    def __init__(self, spec: EnvSpec, *, builds: bool = True) -> None:
        self._id, self._builders, self._builds = spec.id, dict(spec.data), builds

    def __getitem__(self, name: str) -> Path:
        builder = self._builders[name]
        folder = folder_of(name)
        if folder.is_dir():
            return folder
        problem = f"{self._id} needs the data {name}, which is not on this machine"
        command = f"envkit data {name}{' --from FOLDER' if needs_source(builder) else ''}"
        if FOLDER_VARIABLE in os.environ:
            problem = f"{self._id} needs the data {name}, which this sandbox does not see"
            remedy = f"run `{command}` on the machine of the server or training run, and start that again"
            raise UsageError(f"{problem}; {remedy}")
        if needs_source(builder):
            raise UsageError(f"{problem}; run: {command}")
        if not self._builds:
            problem = f"{self._id} needs the data {name}, which its server does not have"
            raise UsageError(f"{problem}; run `{command}` there, and use no nodes, whose sandboxes get no data")
        print(f"{problem}; building it once in {folder}", file=sys.stderr)
        _build(folder, builder, None, lambda line: print(line, file=sys.stderr))
        return folder

    def __contains__(self, name: object) -> bool:
        return name in self._builders

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)


def builders() -> dict[str, tuple[str, str | Callable[..., object]]]:
    """Return the environment and the builder of each kind of data that a registered environment has."""
    load_catalogue()
    return {name: (spec.id, builder) for spec in registry.specs() for name, builder in spec.data.items()}


def needs_source(builder: str | Callable[..., object]) -> bool:
    """Return whether a builder makes its data from files of the user, which it gets as the argument `source`."""
    return "source" in inspect.signature(registry.load(builder)).parameters


def build(name: str, announce: Callable[[str], None], source: Path | None = None) -> bool:
    """Build the data `name`, from the files at `source` if it is made from files, and return whether it was missing.

    Raises:
        UsageError: No environment has such data; it needs a source, or has one that it does not need; it is already
            built, perhaps from another source; or the folder cannot be written.
    """
    known = builders()
    if name not in known:
        raise UsageError(f"no environment has data {name!r}{did_you_mean(name, known)}")
    builder, target = known[name][1], cache_folder() / "data" / name
    is_from_files = needs_source(builder)
    if source is not None and not is_from_files:
        raise UsageError(f"the data {name} is not made from files; leave out --from")
    if source is not None and target.is_dir():
        raise UsageError(f"the data {name} is already in {target}; delete that folder to build it from other files")
    if source is None and is_from_files and not target.is_dir():
        raise UsageError(f"the data {name} is made from your files; run: envkit data {name} --from FOLDER")
    return _build(target, builder, source, announce)


def _build(
    target: Path, builder: str | Callable[..., object], source: Path | None, announce: Callable[[str], None]
) -> bool:
    make = registry.load(builder)
    if source is not None:
        make = partial(make, source=source)
    return make_once(target, lambda _, folder: make(folder, announce), is_made=Path.is_dir, announce=announce)


def views() -> Iterator[tuple[str, str]]:
    """Yield the pairs of `SandboxSpec.views` for all data that was built on this machine."""
    for name in builders():
        folder = cache_folder() / "data" / name
        if folder.is_dir():
            yield str(folder), f"{INSIDE}/{name}"
