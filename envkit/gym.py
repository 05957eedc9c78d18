"""Registration of envkit's environments in Gymnasium: ``gymnasium.make("envkit/Sokoban-v0")``.

``import envkit`` registers the built-in ones, as usual since Gymnasium 1.0 dropped plugins. The id
``"envkit:envkit/Sokoban-v0"`` makes Gymnasium import envkit itself. Environments of installed packages are added by
`register_all`, not by the import, since such a package may itself import envkit.
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

    It calls the entry points of installed packages, but imports no built-in environment. An id that Gymnasium rejects
    is skipped with a warning. Call it again after `envkit.register`.
    """
    load_catalogue()
    _register(registry.specs())


def register_catalogue() -> None:
    """Register the built-in environments; imports neither an environment nor another package."""
    _register(load_catalogue())


def _register(specs: Iterable[EnvSpec]) -> None:
    for spec in specs:
        id = f"{NAMESPACE}/{spec.id}"
        if id not in gymnasium.registry:
            try:
                gymnasium.register(id, "envkit:make", vector_entry_point="envkit:make_vec", kwargs={"env_id": spec.id})
            except gymnasium.error.Error as error:  # one invalid id must not keep the others from being registered
                warnings.warn(f"Gymnasium rejects the id {spec.id!r}: {error}", stacklevel=3)
