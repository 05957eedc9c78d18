"""The built-in worlds, told to the registry: a checkout that is not installed has no entry points."""

from __future__ import annotations

from envkit import registry
from envkit.environments.catalog import CATALOG
from envkit.registry import EnvSpec


def load_catalogue() -> list[EnvSpec]:
    """Register every built-in world, and return what was registered; harmless to repeat."""
    return [registry.register(**entry) for entry in CATALOG]  # type: ignore[arg-type]
