"""Where the head of a Ray cluster is, who says so, and whether it is there: in seconds, where Ray takes a minute."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from envkit.errors import UsageError
from envkit.installation import load

_REACH_S = 3.0
_GREETING_S = 10.0
_FRAME_BYTES = 9
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client begins HTTP/2 (RFC 9113, section 3.4), on which gRPC is built, which a head speaks."""
WHAT_TO_DO = "start one (ray start --head), or name another one (ray.address, or $RAY_ADDRESS)"


@dataclass(frozen=True, slots=True)
class Head:
    """Where a cluster's head should be.

    Attributes:
        address: Host and port.
        source: Who says so, for people.
    """

    address: str
    source: str

    def __str__(self) -> str:
        return f"{self.address!r} ({self.source})"


def find(address: str) -> Head:
    """Return where the head of the cluster at `address` is; ``"auto"`` looks where Ray does.

    Raises:
        ConnectionError: There is no cluster on this machine, and no trace of one.
        ImportError: Ray cannot be used.
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
    """Return if a cluster's head may be there; within 13 s.

    Raises:
        UsageError: It is not; says what was found instead, and what to do.
    """
    if head.address.startswith("ray://"):
        raise UsageError(f"{head}: Ray's client is not enough; run this on a machine of the cluster, with 'auto'")
    host, _, port = head.address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"{head} is not the address of a Ray cluster, such as '10.0.0.1:6379'")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S) as connected:
            if os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true"):
                return  # it would not say more before it knows who we are
            what = _what_answers(connected)
    except OSError as error:
        why = f"no answer within {_REACH_S:g} s" if isinstance(error, TimeoutError) else error.strerror or error
        raise UsageError(f"there is no Ray cluster at {head}: {why}; {WHAT_TO_DO}") from None
    if what:
        raise UsageError(f"what listens at {head} does not answer as the head of a Ray cluster: {what}; {WHAT_TO_DO}")


def _what_answers(connected: socket.socket) -> str:
    """Say why it cannot be a head that is connected; empty if it may be one."""
    said = b""
    connected.settimeout(_GREETING_S)
    try:
        connected.sendall(_HELLO)
        while len(said) < _FRAME_BYTES and (piece := connected.recv(_FRAME_BYTES - len(said))):
            said += piece
    except TimeoutError:
        return f"it says nothing for {_GREETING_S:g} s"
    except OSError:  # it has closed the connection, as one that says nothing at all
        pass
    if len(said) == _FRAME_BYTES and said[3] == 4 and not any(said[5:]):  # the settings of the connection
        return ""
    return f"it says {said!r}" if said else "it closes the connection"
