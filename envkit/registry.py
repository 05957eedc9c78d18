"""The registry of environments: ids, entry points and options. Environments are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from envkit.errors import ConfigError, UnknownEnvError
from envkit.types import Options

ENTRY_POINT_GROUP = "envkit.envs"
"""Name of the entry point group of packages with environments.

Each entry point is a function that registers the environments of its package. It is called once, without arguments.
"""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """A registered environment.

    Attributes:
        id: Its name, ending in a version, such as ``"Sokoban-v0"``.
        entry_point: ``"module:Class"`` or a callable. Called with the options as keyword arguments, it returns a
            ``gymnasium.Env`` with text observations and actions, or an `envkit.env.AsyncEnv`.
        options: Default options of this id, which callers may override.
        expert: ``"module:Class"`` of an `envkit.protocols.Expert`, or None. It is called with the same options as the
            entry point, because options may change the observations that the expert reads.
        summary: One-line description, for lists.
        splits: Values of its option ``split``, which separates training levels from evaluation levels. If empty,
            training and evaluation levels differ only in their seeds.
        compact_options: Options that give the shortest observations, for policies trained from scratch.
        replayable: Whether its state depends only on task and actions, so that repeating the actions restores a lost
            episode.
        is_shareable: Whether many episodes may share one process; otherwise a fleet runs each in a separate sandbox.
        vector_entry_point: ``"module:Class"`` or a callable, or None. Called with ``num_envs``, ``autoreset`` and
            options, it returns a ``gymnasium.vector.VectorEnv`` equivalent to ``num_envs`` single environments.
    """

    id: str
    entry_point: str | Callable[..., Any]
    options: Options = field(default_factory=dict)
    expert: str | Callable[..., Any] | None = None
    summary: str = ""
    splits: tuple[str, ...] = ()
    compact_options: Options = field(default_factory=dict)
    replayable: bool = True
    is_shareable: bool = True
    vector_entry_point: str | Callable[..., Any] | None = None


_SPECS: dict[str, EnvSpec] = {}
_PACKAGES: dict[str, str] = {}
"""Ids that installed packages registered through their entry points, with the name of the package."""
_LOADED: set[str] = set()
_LOADING: set[str] = set()
_LOCK = threading.RLock()
"""Lock for loading entry points. `register` does not acquire it, because modules may call `register` when imported."""


def register(
    id: str,
    entry_point: str | Callable[..., Any],
    *,
    options: Options | None = None,
    expert: str | Callable[..., Any] | None = None,
    summary: str = "",
    splits: Sequence[str] = (),
    compact_options: Options | None = None,
    replayable: bool = True,
    is_shareable: bool = True,
    vector_entry_point: str | Callable[..., Any] | None = None,
) -> EnvSpec:
    """Register an environment; see `EnvSpec` for the arguments. Registering the same spec twice has no effect.

    Raises:
        ConfigError: The id has no version, or belongs to a different environment.
    """
    name, dash, version = id.rpartition("-v")
    if not (dash and name and version.isdecimal()):
        raise ConfigError([f"id: {id!r} must end in a version, such as {id.rstrip('-') or 'Name'}-v0"])
    frozen = (
        MappingProxyType(dict(options or {})),
        expert,
        summary,
        tuple(splits),
        MappingProxyType(dict(compact_options or {})),
    )
    spec = EnvSpec(id, entry_point, *frozen, replayable, is_shareable, vector_entry_point)
    old = _SPECS.setdefault(id, spec)
    if old != spec:
        raise ConfigError([f"id: {id!r} is already registered for {old.entry_point}"])
    return spec


def find(env_id: str) -> EnvSpec:
    """Return the spec of `env_id`.

    Raises:
        UnknownEnvError: There is no such id; the message names the closest id.
    """
    # Load the entry points only for an unknown id, because scanning the installed packages takes milliseconds.
    if env_id not in _SPECS:
        load_entry_points()
    try:
        return _SPECS[env_id]
    except KeyError:
        raise UnknownEnvError(env_id, list(_SPECS)) from None


def package_of(env_id: str) -> str | None:
    """Return the name of the installed package whose entry point registered `env_id`; None if no package did."""
    load_entry_points()
    return _PACKAGES.get(env_id)


def specs() -> Iterator[EnvSpec]:
    """Return all registered environments, sorted by id."""
    load_entry_points()
    return iter(sorted(_SPECS.values(), key=lambda spec: spec.id))


def load_entry_points() -> None:
    """Call the entry points of installed packages, which register environments. Failing packages cause a warning.

    A package is skipped until the next call if it is still being imported, or if its own entry point makes this call.
    """
    with _LOCK:
        for point in entry_points(group=ENTRY_POINT_GROUP):
            if point.value in _LOADED | _LOADING or _is_half_imported(point):
                continue
            _LOADING.add(point.value)
            known = set(_SPECS)
            try:
                point.load()()
            except Exception as error:  # a broken package must not prevent the others from loading
                warnings.warn(f"environments of {point.value!r} are left out: {error!r}", stacklevel=2)
            finally:
                _LOADING.discard(point.value)
                package = point.dist.name if point.dist is not None else point.module
                _PACKAGES.update(dict.fromkeys(_SPECS.keys() - known, package))
            _LOADED.add(point.value)


def _is_half_imported(point: EntryPoint) -> bool:
    """Return whether the entry point's module, or a parent package, is still being imported."""
    parts = point.module.split(".")
    modules = (sys.modules.get(".".join(parts[:count])) for count in range(1, len(parts) + 1))
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)


def load(entry_point: str | Callable[..., Any]) -> Any:
    """Import and return ``"module:name"``; a callable is returned unchanged."""
    if not isinstance(entry_point, str):
        return entry_point
    module, _, name = entry_point.partition(":")
    return getattr(importlib.import_module(module), name)


def defaults(spec: EnvSpec, options: Options) -> Mapping[str, Any]:
    """Return the default options of a spec, overridden by the caller's `options`."""
    return {**spec.options, **options}
