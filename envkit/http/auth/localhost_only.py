"""Check of requests to a server without tokens: local programs may call it, foreign web pages may not.

A browser on this machine runs scripts of any web site. It sends the site's origin (``Origin``) and the host name of the
request (``Host``). In a DNS rebinding attack, the site's own host name resolves to this machine, so ``Host`` is not a
name of this machine.
"""

from __future__ import annotations

import ipaddress
import re

from envkit.errors import ForbiddenError

_PORT = re.compile(rb":\d*$")


def require_local(server: tuple[str, int | None] | None, host: bytes, origin: bytes | None) -> None:
    """Check that a request does not come from a foreign web page.

    Args:
        server: Address and port that received the request; no port for a Unix socket.
        host: Its ``Host``; empty without one.
        origin: Its ``Origin``, if any.

    Raises:
        ForbiddenError: The origin is foreign, or the host is not this machine.
    """
    if origin is not None and origin.partition(b"://")[2].lower() != host.lower():
        raise _refusal(f"web pages of {_text(origin)} may not call it")
    if server is not None and server[1] is not None and host and not _is_local(host, server[0]):
        raise _refusal(f"its host must be localhost, not {_text(host)}")


def _is_local(host: bytes, address: str) -> bool:
    """Return whether ``Host`` is this machine, or the `address` of the server."""
    name = _PORT.sub(b"", host).strip(b"[]").decode("latin-1").lower()
    if name in ("localhost", address):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _refusal(reason: str) -> ForbiddenError:
    return ForbiddenError(f"this server has no tokens, so {reason}; create a token with 'envkit token create'")


def _text(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
