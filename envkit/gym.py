"""Registration of envkit's environments in Gymnasium: ``gymnasium.make("envkit/Sokoban-v0")``.

``import envkit`` registers the built-in environments. With the id ``"envkit:envkit/Sokoban-v0"``, Gymnasium imports
envkit itself. To register environments of other installed packages, call `register_all`. ``import envkit`` does not do
this, because these packages may import envkit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import gymnasium

from envkit import registry
from envkit.registry import EnvSpec
from envkit.wiring.catalogue import NAMESPACE, load_catalogue


def register_all() -> None:
    """Register all environments of `envkit.registered` in Gymnasium, except those that Gymnasium already has.

    This calls the entry points of installed packages, but does not import the built-in environments. Ids that Gymnasium
    rejects are skipped with a warning. After `envkit.register`, call this again.
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
                # Only warn, so that one invalid id does not prevent the registration of the other ids.
                warnings.warn(f"Gymnasium rejects the id {spec.id!r}: {error}", stacklevel=3)
