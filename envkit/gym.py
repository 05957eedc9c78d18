"""Every environment of envkit under its name in Gymnasium: ``gymnasium.make("envkit/Sokoban-v0")``.

``import envkit`` registers the built-in ones, as is the custom since Gymnasium 1.0 dropped its plugins. A program that
is told only an id can be told ``"envkit:envkit/Sokoban-v0"``, which makes Gymnasium import envkit itself. What
installed packages bring is added by `register_all`, not by the import: such a package may be what imports envkit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import gymnasium

from envkit import registry
from envkit.registry import EnvSpec
from envkit.wiring.catalogue import load_catalogue

NAMESPACE = "envkit"
"""What stands before the slash in Gymnasium's ids."""


def register_all() -> None:
    """Register whatever `envkit.registered` lists and Gymnasium does not know yet.

    That is what installed packages bring, too: their entry points are called, but no built-in world is imported. An id
    that Gymnasium cannot read is left out, with a warning. Call it again after `envkit.register`.
    """
    load_catalogue()
    _register(registry.specs())


def register_catalogue() -> None:
    """Register the built-in environments; neither a world nor another package is imported."""
    _register(load_catalogue())


def _register(specs: Iterable[EnvSpec]) -> None:
    for spec in specs:
        id = f"{NAMESPACE}/{spec.id}"
        if id not in gymnasium.registry:
            try:
                gymnasium.register(id, "envkit:make", vector_entry_point="envkit:make_vec", kwargs={"env_id": spec.id})
            except gymnasium.error.Error as error:  # one odd name must not take the others with it
                warnings.warn(f"Gymnasium does not take {spec.id!r}: {error}", stacklevel=3)
