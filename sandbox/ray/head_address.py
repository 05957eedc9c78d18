"""Find the head of a Ray cluster, and check in seconds that it accepts connections. Ray would need a minute."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from envkit.errors import UsageError
from envkit.installation import load

_REACH_S = 3.0
WHAT_TO_DO = "start one (ray start --head), or name another one (ray.address, or $RAY_ADDRESS)"


@dataclass(frozen=True, slots=True)
class Head:
    """The address of a Ray cluster's head.

    Attributes:
        address: Host and port.
        source: Where the address comes from, as text for messages.
    """

    address: str
    source: str

    def __str__(self) -> str:
        return f"{self.address!r} ({self.source})"


def find(address: str) -> Head:
    """Return the head at `address`. With ``"auto"``, search for a head in the same places as Ray.

    Raises:
        ConnectionError: The address is ``"auto"``, and no head was found.
        ImportError: Ray cannot be imported.
    """
    if address != "auto":
        return Head(address, "as given by ray.address")
    if (named := os.environ.get("RAY_ADDRESS", "")) not in ("", "auto"):
        return Head(named, "as given by $RAY_ADDRESS")
    services = load("ray._private.services")
    found = str(services.get_ray_address_from_environment("auto", None))
    file = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    if file.is_file() and file.read_text().strip() == found:
        return Head(found, f"as given by {file}, for the last cluster on this machine")
    return Head(found, "where a head runs on this machine")


def require(head: Head) -> None:
    """Raise an error unless a server accepts a connection at `head` within 3 s.

    Raises:
        UsageError: No server accepts it, or the address is not valid. The message says what to do.
    """
    if head.address.startswith("ray://"):
        raise UsageError(f"{head}: Ray Client is not supported; run this on a machine of the cluster, with 'auto'")
    host, _, port = head.address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"{head} is not the address of a Ray cluster; use a host and port, such as '10.0.0.1:6379'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        why = f"no answer within {_REACH_S:g} s" if isinstance(error, TimeoutError) else error.strerror or error
        raise UsageError(f"there is no Ray cluster at {head}: {why}; {WHAT_TO_DO}") from None
