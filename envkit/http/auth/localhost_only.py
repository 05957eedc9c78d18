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
    if origin is not None and origin.partition(b"://")[2].lower() != host.lower():
        raise _refusal(f"web pages of {_text(origin)} may not call it")
    if server is not None and server[1] is not None and host and not _is_local(host, server[0]):
        raise _refusal(f"requests must have the host localhost, not {_text(host)}")


def _is_local(host: bytes, address: str) -> bool:
    """Return whether `host` names this machine: localhost, a loopback address, or the `address` of the server."""
    name = _PORT.sub(b"", host).strip(b"[]").decode("latin-1").lower()
    return name == address or is_loopback(name)


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refusal(reason: str) -> ForbiddenError:
    return ForbiddenError(f"this server has no tokens, so {reason}; create a token with 'envkit token create'")


def _text(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
