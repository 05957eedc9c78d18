"""Protects a server without tokens: programs on this machine may call it, web pages of other sites may not.

A browser on this machine runs scripts of any web site, and these could call the server. The browser sends the site of
the script in the header ``Origin`` and the requested host name in ``Host``. In an attack by DNS rebinding, ``Host`` is
the attacker's host name, not a name of this machine.
"""

from __future__ import annotations

import ipaddress
import re

from envkit.errors import ForbiddenError

_PORT = re.compile(rb":\d*$")


def require_local(server: tuple[str, int | None] | None, host: bytes, origin: bytes | None) -> None:
    """Check that a request does not come from a foreign web page.

    Args:
        server: Address and port that received the request; the port is None for a Unix socket.
        host: The header ``Host``; empty if missing.
        origin: The header ``Origin``; None if missing.

    Raises:
        ForbiddenError: The request comes from a page of another site, or its ``Host`` does not name this machine.
    """
    reason = ""
    if origin is not None and origin.partition(b"://")[2].lower() != host.lower():
        reason = f"web pages of {origin[:100].decode('latin-1')!r} may not call it"
    elif server is not None and server[1] is not None and host:
        name = _PORT.sub(b"", host).strip(b"[]").decode("latin-1").lower()
        if name != server[0] and not is_loopback(name):
            reason = f"requests must have the host localhost, not {host[:100].decode('latin-1')!r}"
    if reason:
        raise ForbiddenError(f"this server has no tokens, so {reason}; create a token with 'envkit token create'")


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
