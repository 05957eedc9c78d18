"""Registers the built-in environments. Works in a checkout of the repository too, where entry points are missing."""

from __future__ import annotations

from envkit import registry
from envkit.environments.catalog import CATALOG
from envkit.registry import EnvSpec

NAMESPACE = "envkit"
"""Namespace of envkit's ids in Gymnasium: the part before the slash."""


def load_catalogue() -> list[EnvSpec]:
    """Register every built-in environment and return the specs; safe to repeat."""
    return [registry.register(**entry) for entry in CATALOG]  # type: ignore[arg-type]
