"""Messages about nodes: what a node reports, how it joins a gateway, and what the gateway knows about its nodes."""

from __future__ import annotations

from typing import Annotated

import msgspec

NodeName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9._:-]{1,100}$(?!\n)",
        description="Name of a node: 1 to 100 letters, digits, dots, dashes, underscores, colons.",
    ),
]


class CapacityReply(msgspec.Struct, frozen=True):
    """Maximum totals over all sandboxes of a node; null means no limit."""

    sandboxes: int | None = None
    cpus: float | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    pids: int | None = None


class NodeReply(msgspec.Struct, frozen=True):
    """What a node is and has.

    `run` is a random name of its process. `images` are the Docker images on it, and `data` the folders that its
    sandboxes can mount. `python` is the path of its Python. `at_s` is its clock, in seconds since 1970.
    """

    run: str
    version: str
    backend: str
    capabilities: dict[str, bool]
    capacity: CapacityReply
    processors: int
    architecture: str
    python: str
    at_s: float
    images: list[str] = []
    data: list[str] = []


class JoinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that joins the server: its name, its address, and the token that the server needs there."""

    node: NodeName
    url: str
    token: str


class JoinFrame(JoinBody, frozen=True, forbid_unknown_fields=True):
    """A node that joins the server."""


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the node gets no new sandboxes."""

    drains: bool = True


class DrainFrame(DrainBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The node to drain, or to use again."""

    node: NodeName


class NodeStatus(msgspec.Struct, frozen=True):
    """A node of the server.

    `state` is ``up``, ``draining`` or ``lost``; `why` says why a node is lost. `facts` is what it reported last; null
    if it has never answered.
    """

    node: str
    url: str
    state: str
    why: str
    sandboxes: int
    facts: NodeReply | None


class NodesReply(msgspec.Struct, frozen=True):
    """The nodes of the server that are other machines."""

    nodes: list[NodeStatus]
