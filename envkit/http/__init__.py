"""Environments and sandboxes over HTTP and WebSocket: envkit's own protocol, its server and its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envkit.http.api.app import create_app
    from envkit.http.client.env_client import EnvClient
    from envkit.http.client.sandbox_client import SandboxClient
    from envkit.http.server.server import serve

__all__ = ["EnvClient", "SandboxClient", "create_app", "serve"]

_LAZY = {
    "EnvClient": "envkit.http.client.env_client",
    "SandboxClient": "envkit.http.client.sandbox_client",
    "create_app": "envkit.http.api.app",
    "serve": "envkit.http.server.server",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'envkit.http' has no attribute {name!r}")
