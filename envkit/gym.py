"""Every environment of envkit under its name in Gymnasium: ``gymnasium.make("envkit/Sokoban-v0")``.

``import envkit`` registers them, as is the custom since Gymnasium 1.0 dropped its plugins. A program that is told only
an id can be told ``"envkit:envkit/Sokoban-v0"``, which makes Gymnasium import envkit itself.
"""

from __future__ import annotations

import warnings

import gymnasium

from envkit import registry
from envkit.wiring.catalogue import load_catalogue

NAMESPACE = "envkit"
"""What stands before the slash in Gymnasium's ids."""


def register_all() -> None:
    """Register whatever `envkit.registered` lists and Gymnasium does not know yet.

    No world is imported. An id that Gymnasium cannot read is left out, with a warning. Call it again after
    `envkit.register`.
    """
    load_catalogue()
    for spec in registry.specs():
        id = f"{NAMESPACE}/{spec.id}"
        if id not in gymnasium.registry:
            try:
                gymnasium.register(id, "envkit:make", kwargs={"env_id": spec.id})
            except gymnasium.error.Error as error:  # one odd name must not take the others with it
                warnings.warn(f"Gymnasium does not take {spec.id!r}: {error}", stacklevel=2)
