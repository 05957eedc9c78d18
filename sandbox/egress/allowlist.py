"""The allowlist of hosts that a sandbox may reach.

A host must be on the list and have a public address. For each connection, the proxy resolves the name once and connects
to the address that it has checked, so DNS rebinding cannot bypass the check.
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
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        # IPv4: the special-purpose addresses in IANA's registry, multicast, and an address of the Azure cloud.
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; 100.100.100.200 is Alibaba Cloud's metadata server
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's host services, at the same address on every virtual machine
        "169.254.0.0/16",  # link-local; 169.254.169.254 is the metadata server of most clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments, such as DS-Lite
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112; a server in the local network may have this address
        "192.52.193.0/24",  # AMT relays; a relay in the local network may have this address
        "192.88.99.0/24",  # 6to4 relays; a relay in the local network may have this address
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # network benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        # IPv6: the next three networks are all addresses outside global unicast (2000::/3). They contain loopback,
        # private, link-local and multicast addresses, and ::ffff:0:0/96 and 64:ff9b::/96, which embed IPv4 addresses.
        "::/3",
        "4000::/2",
        "8000::/1",
        "2001::/23",  # protocol assignments, such as Teredo, whose addresses embed IPv4 addresses
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, whose addresses embed IPv4 addresses
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)
"""Networks that do not, or may not, belong to the public internet. `ipaddress` would call some of them global."""


class RefusedError(Exception):
    """The proxy refuses a request.

    Attributes:
        status: HTTP status of the reply: 403 if the target is forbidden, 400 for a bad request, 502 if the target does
            not answer.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def why_refused(spec: SandboxSpec) -> str | None:
    """Return one line that says why a sandbox cannot have the network `spec.network`; None if it can."""
    if (why := why_no_network(spec.network)) is not None:
        return why
    is_alone = spec.detached and not isinstance(spec.network, str)
    return "a detached sandbox cannot have an allowlist: its proxy ends with this process" if is_alone else None


def is_public(text: str) -> bool:
    """Whether `text` is an IP address on the public internet, which means outside the networks in `_NOT_PUBLIC`.

    An IPv6 address that embeds an IPv4 address does not count as public.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not any(address in network for network in _NOT_PUBLIC)


async def public_addresses(host: str, port: int) -> Sequence[Address]:
    """Resolve `host` and return its public addresses; empty if it has none or cannot be resolved."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return [(str(address[0]), port) for *_, address in found if is_public(str(address[0]))]


class Allowlist:
    """The hosts that a sandbox may reach.

    Args:
        hosts: The names of the hosts; ``*.example.org`` matches all subdomains of ``example.org``.
        resolve: Receives a host name and a port; returns the addresses to which a connection is allowed.
    """

    def __init__(self, hosts: Sequence[str], resolve: Resolve = public_addresses) -> None:
        self._hosts = [host.lower() for host in hosts]
        self._resolve = resolve

    async def connect(self, host: str, port: int) -> socket.socket:
        """Connect to a host and return the non-blocking socket.

        Raises:
            RefusedError: The host is not allowed or not reachable.
        """
        host = host.lower().removesuffix(".")
        # `is_host` rejects a name that contains NUL. Without this check, the allowlist would match the end of the name,
        # but DNS would resolve only the part before the NUL.
        is_named = any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in self._hosts)
        if not is_named or not is_host(host):
            raise RefusedError(403, f"{host} is not on the allowlist of this sandbox; add it to `network`")
        if port not in _PORTS:
            raise RefusedError(403, f"port {port} is refused; use 80 or 443")
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
