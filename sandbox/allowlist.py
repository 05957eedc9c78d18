"""Which hosts a box may reach, and at which addresses.

A host must be on the list and have a public address; the address that was looked at is the one that is connected to, so
that a name which changes its address in between gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import anyio

from envkit.types import SandboxSpec, is_host, why_no_network

Address: TypeAlias = tuple[str, int]
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[Address]]]

_PORTS = (80, 443)
_CONNECT_S = 10.0
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_STAND_FOR_IPV4 = (ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("2001::/32"))


class RefusedError(Exception):
    """A request that is not let through.

    Attributes:
        status: What the client is told: 403, or 400 or 502 for what fails otherwise.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def why_refused(spec: SandboxSpec) -> str | None:
    """Return why a box cannot have the network that `spec` asks for, in one line; None when it can."""
    if (why := why_no_network(spec.network)) is not None:
        return why
    is_alone = spec.stay and not isinstance(spec.network, str)
    return "a box that stays has no proxy to reach hosts by: that is in this process" if is_alone else None


def is_public(text: str) -> bool:
    """Whether an address is one of the internet: not of this host, its networks, its containers or its cloud.

    An address of IPv6 that stands for one of IPv4 is not taken for public either.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _GLOBAL_UNICAST or any(address in network for network in _STAND_FOR_IPV4)
    ):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


async def public_addresses(host: str, port: int) -> Sequence[Address]:
    """Return where everybody can reach `host`; nothing when it has no public address."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return [(str(address[0]), port) for *_, address in found if is_public(str(address[0]))]


class Allowlist:
    """The hosts that a box may reach.

    Args:
        hosts: Their names; ``*.example.org`` is all below that one.
        resolve: Says where a host is; what it leaves out is not reached.
    """

    def __init__(self, hosts: Sequence[str], resolve: Resolve = public_addresses) -> None:
        self._hosts = [host.lower() for host in hosts]
        self._resolve = resolve

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a connected, non-blocking stream to a host.

        Raises:
            RefusedError: It may not, or cannot, be reached.
        """
        host = host.lower().removesuffix(".")
        # A name with a NUL in it would pass here by its end, and be looked up by its beginning.
        is_named = any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in self._hosts)
        if not is_named or not is_host(host):
            raise RefusedError(403, f"{host} is not among the hosts that this sandbox may reach")
        if port not in _PORTS:
            raise RefusedError(403, f"port {port} is refused: only 80 and 443 are reached")
        addresses = await self._resolve(host, port)
        if not addresses:
            raise RefusedError(403, f"{host} has no public address")
        for address in addresses:
            if (found := await _connected(address)) is not None:
                return found
        raise RefusedError(502, f"{host} does not answer on port {port}")


async def _connected(address: Address) -> socket.socket | None:
    try:
        target = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return None
    target.setblocking(False)
    try:
        with anyio.move_on_after(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(target, address)
            return target
    except OSError:
        pass
    except BaseException:
        target.close()
        raise
    target.close()
    return None
