"""The built-in worlds, told to the registry: a checkout that is not installed has no entry points."""

from __future__ import annotations

from envkit import registry
from envkit.environments.catalog import CATALOG


def load_catalogue() -> None:
    """Register every built-in world; harmless to repeat."""
    for entry in CATALOG:
        registry.register(**entry)  # type: ignore[arg-type]
