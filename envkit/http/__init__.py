"""Environments and sandboxes over HTTP and WebSocket: envkit's own protocol, its server and its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envkit.installation import late_names

if TYPE_CHECKING:
    from envkit.http.api.app import create_app
    from envkit.http.client.env_client import EnvClient
    from envkit.http.client.sandbox_client import SandboxClient
    from envkit.http.server.server import serve

__all__ = ["EnvClient", "SandboxClient", "create_app", "serve"]

__getattr__, __dir__ = late_names(
    __name__,
    {
        "EnvClient": "envkit.http.client.env_client",
        "SandboxClient": "envkit.http.client.sandbox_client",
        "create_app": "envkit.http.api.app",
        "serve": "envkit.http.server.server",
    },
)
