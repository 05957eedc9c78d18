"""Registration of envkit's environments in Gymnasium: ``gymnasium.make("envkit/Sokoban-v0")``.

``import envkit`` registers the built-in environments. With the id ``"envkit:envkit/Sokoban-v0"``, Gymnasium imports
envkit itself. The import does not register the environments of installed packages, because those packages may import
envkit; call `register_all` for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import gymnasium

from envkit import registry
from envkit.registry import EnvSpec
from envkit.wiring.catalogue import load_catalogue

NAMESPACE = "envkit"
"""Namespace of the ids in Gymnasium."""


def register_all() -> None:
    """Register all environments of `envkit.registered` that Gymnasium does not know yet.

    This calls the entry points of installed packages, but imports no built-in environment. Ids that Gymnasium rejects
    are skipped with a warning. Call it again after `envkit.register`.
    """
    load_catalogue()
    _register(registry.specs())


def register_catalogue() -> None:
    """Register the built-in environments, without importing environments or other packages."""
    _register(load_catalogue())


def _register(specs: Iterable[EnvSpec]) -> None:
    for spec in specs:
        id = f"{NAMESPACE}/{spec.id}"
        if id not in gymnasium.registry:
            try:
                gymnasium.register(id, "envkit:make", vector_entry_point="envkit:make_vec", kwargs={"env_id": spec.id})
            except gymnasium.error.Error as error:  # one invalid id must not prevent the registration of the others
                warnings.warn(f"Gymnasium rejects the id {spec.id!r}: {error}", stacklevel=3)
