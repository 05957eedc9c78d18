"""Data of environments: built once on this machine, and read-only in sandboxes.

``envkit data NAME`` builds the data in the cache folder. Sandboxes see it at ``/data/NAME``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from envkit import registry
from envkit.errors import UsageError, did_you_mean
from envkit.registry import EnvSpec
from envkit.trainer_bridge.models.cache import make_once
from envkit.trainer_bridge.models.catalogue import cache_folder
from envkit.wiring.catalogue import load_catalogue

INSIDE = "/data"
"""Folder in a sandbox that contains the data."""
FOLDER_VARIABLE = "ENVKIT_DATA"
"""Environment variable with the folder that contains the data; set in sandboxes."""


def folder_of(name: str) -> Path:
    """Return the folder of the data `name`, for this process. The folder may not exist."""
    inside = os.environ.get(FOLDER_VARIABLE)
    return (Path(inside) if inside else cache_folder() / "data") / name


def folders(spec: EnvSpec) -> dict[str, Path]:
    """Return the folder of each kind of data of an environment.

    Raises:
        UsageError: Data was not built; the message has the command that builds it.
    """
    found = {name: folder_of(name) for name in spec.data}
    for name, folder in found.items():
        if not folder.is_dir():
            raise UsageError(f"{spec.id} needs the data {name}, which is not on this machine; run: envkit data {name}")
    return found


def builders() -> dict[str, tuple[str, str | Callable[..., object]]]:
    """Return the environment and the builder of each kind of data that a registered environment has."""
    load_catalogue()
    return {name: (spec.id, builder) for spec in registry.specs() for name, builder in spec.data.items()}


def build(name: str, announce: Callable[[str], None]) -> bool:
    """Build the data `name`, and return whether it was missing.

    Raises:
        UsageError: No environment has such data, or the folder cannot be written.
    """
    known = builders()
    if name not in known:
        raise UsageError(f"no environment has data {name!r}{did_you_mean(name, known)}")
    target = cache_folder() / "data" / name
    make = registry.load(known[name][1])
    return make_once(target, lambda _, folder: make(folder, announce), is_made=Path.is_dir, announce=announce)


def views() -> Iterator[tuple[str, str]]:
    """Yield the pairs of `SandboxSpec.views` for all data that was built on this machine."""
    for name in builders():
        folder = cache_folder() / "data" / name
        if folder.is_dir():
            yield str(folder), f"{INSIDE}/{name}"
