"""Sandboxes that run untrusted programs: the backend classes and the pool class, each imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if not __name__.startswith("envkit."):
    raise ImportError(
        "import this package as envkit.sandbox, not as a top-level package"
        " (to import a folder of your own with this name instead, add an __init__.py to that folder)"
    )

from envkit.installation import late_names

if TYPE_CHECKING:
    from .bubblewrap.backend import LocalBackend
    from .docker.backend import DockerBackend
    from .pool import Pool
    from .process.backend import ProcessBackend

__all__ = ["DockerBackend", "LocalBackend", "Pool", "ProcessBackend"]

__getattr__, __dir__ = late_names(
    __name__,
    {
        "DockerBackend": "envkit.sandbox.docker.backend",
        "LocalBackend": "envkit.sandbox.bubblewrap.backend",
        "Pool": "envkit.sandbox.pool",
        "ProcessBackend": "envkit.sandbox.process.backend",
    },
)
