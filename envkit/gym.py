"""Registration of envkit's environments in Gymnasium: ``gymnasium.make("envkit/Sokoban-v0")``.

``import envkit`` registers the built-in environments. If the id is ``"envkit:envkit/Sokoban-v0"``, Gymnasium imports
envkit on its own. The import does not register environments of other installed packages, because these packages may
import envkit themselves; call `register_all` to register them.
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
    """Register all environments of `envkit.registered` in Gymnasium, except those that it already knows.

    `register_all` calls the entry points of installed packages, but does not import built-in environments. Ids that
    Gymnasium rejects are skipped with a warning. Call `register_all` again after `envkit.register`.
    """
    load_catalogue()
    _register(registry.specs())


def register_catalogue() -> None:
    """Register the built-in environments in Gymnasium, without importing them or other packages."""
    _register(load_catalogue())


def _register(specs: Iterable[EnvSpec]) -> None:
    for spec in specs:
        id = f"{NAMESPACE}/{spec.id}"
        if id not in gymnasium.registry:
            try:
                gymnasium.register(id, "envkit:make", vector_entry_point="envkit:make_vec", kwargs={"env_id": spec.id})
            except gymnasium.error.Error as error:
                # Warn instead of raising an error, so that one invalid id does not prevent the registration of the
                # others.

                warnings.warn(f"Gymnasium rejects the id {spec.id!r}: {error}", stacklevel=3)
