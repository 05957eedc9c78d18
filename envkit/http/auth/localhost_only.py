"""Who asks a server without tokens: programs of this machine, but no web page of others.

A browser on this machine runs programs of anybody. It names the page that they come from (``Origin``), and the host
that they believe to ask (``Host``), which is another than us where somebody's name was pointed at our address.
"""

from __future__ import annotations

import ipaddress
import re

from envkit.errors import ForbiddenError

_PORT = re.compile(rb":\d*$")


def require_local(server: tuple[str, int | None] | None, host: bytes, origin: bytes | None) -> None:
    """Let pass what no web page of others can send.

    Args:
        server: Where the request came in: address and port; no port for a Unix socket.
        host: Its ``Host``; empty if there was none.
        origin: Its ``Origin``, if there was one.

    Raises:
        ForbiddenError: A page of others asks, or one that calls us by a name which is not this machine's.
    """
    if origin is not None and origin.partition(b"://")[2].lower() != host.lower():
        raise _refusal(f"web pages of {_text(origin)} may not use it")
    if server is not None and server[1] is not None and host and not _is_here(host, server[0]):
        raise _refusal(f"it has to be asked as localhost, not as {_text(host)}")


def _is_here(host: bytes, address: str) -> bool:
    """Say whether the ``Host`` of a request means this machine itself, or the `address` that we listen on."""
    name = _PORT.sub(b"", host).strip(b"[]").decode("latin-1").lower()
    if name in ("localhost", address):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _refusal(why: str) -> ForbiddenError:
    return ForbiddenError(f"this server has no tokens, so {why}; make one with 'envkit token create'")


def _text(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
