"""Sandboxes: where programs run, and whether they are alive. Backends and the pool are imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if not __name__.startswith("envkit."):
    raise ImportError(
        "import this package as envkit.sandbox: two copies of a module are worse than an error"
        " (a folder of your own with this name needs an __init__.py)"
    )

if TYPE_CHECKING:
    from .bubblewrap.backend import LocalBackend
    from .docker.backend import DockerBackend
    from .pool import Pool
    from .process.backend import ProcessBackend

__all__ = ["DockerBackend", "LocalBackend", "Pool", "ProcessBackend"]

_LATE = {
    "DockerBackend": "envkit.sandbox.docker.backend",
    "LocalBackend": "envkit.sandbox.bubblewrap.backend",
    "Pool": "envkit.sandbox.pool",
    "ProcessBackend": "envkit.sandbox.process.backend",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        import importlib

        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'envkit.sandbox' has no attribute {name!r}")
