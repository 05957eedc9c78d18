"""The nodes of a gateway and the ledger of its leases."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from envkit import clock
from envkit.config.serving import ServeConfig
from envkit.errors import UsageError
from envkit.fleet.ledger import LeaseLedger
from envkit.installation import command
from envkit.sandbox import machine
from envkit.sandbox.docker import backend as docker
from envkit.sandbox.docker.backend import GAMES_IMAGE, DockerBackend
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.process.backend import ProcessBackend
from envkit.types import Cause
from envkit.wiring.gateway.token_store import LEDGER, state_folder
from envkit.wiring.sandboxes.backends import choose

Kind: TypeAlias = Literal["local", "docker", "process"]

HERE = "here"
"""Name of the node that is this machine."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The sandboxes of this machine.

    Attributes:
        node: Its node in a pool, with an open backend.
        kind: Kind of the backend.
        what: Short description of the backend, for start messages.
        disks: Returns, for each disk by name, its free MiB and the MiB that must stay free.
    """

    node: Node
    kind: Kind
    what: str
    disks: Callable[[], Mapping[str, tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class FleetNodes:
    """The nodes of a gateway at start.

    Attributes:
        nodes: The node of this machine; empty if the gateway uses only other machines.
        what: Short description of backend and nodes, for start messages.
        in_image: Whether the sandboxes run in a Docker image.
        isolates: Whether sandboxes are isolated from this process.
        ledger: The ledger of leases; None if leases are not persisted.
        disks: Returns, for each disk by name, its free MiB and the MiB that must stay free; None if unknown.
    """

    nodes: Sequence[Node]
    what: str
    in_image: bool
    isolates: bool
    ledger: LeaseLedger | None
    disks: Callable[[], Mapping[str, tuple[int, int]]] | None = None


@asynccontextmanager
async def open_machine(config: ServeConfig) -> AsyncIterator[Machine]:
    """Open the backend of this machine, and find out its capacity.

    Raises:
        UsageError: The backend does not work here, or its image is missing; the message says what to do.
    """
    assert config.backend != "nodes"
    assert config.backend != "none"
    image = config.envs.image or GAMES_IMAGE
    backend, what, why, _ = await choose(config.backend, image=image, may_be_process=True)
    async with backend:
        found = await clock.to_thread(machine.this_machine)
        # Ask Docker for the memory, because its daemon may run on another machine.
        if isinstance(backend, DockerBackend):
            if why_not := await docker.why_unavailable(image):
                raise UsageError(f"envs.image: {why_not}")
            found = replace(found, memory_mib=backend.machine_memory_mib)
        limits = Capacity(sandboxes=config.node.max_sandboxes, **config.node.model_dump(exclude={"max_sandboxes"}))
        node = Node(HERE, backend, machine.with_defaults(limits, found))
        kind: Kind = "process" if isinstance(backend, ProcessBackend) else "local"
        if isinstance(backend, DockerBackend):
            kind = "docker"
        yield Machine(node, kind, what + why, backend.disks)


@asynccontextmanager
async def open_nodes(config: ServeConfig) -> AsyncIterator[FleetNodes]:
    """Open the ledger and, unless the gateway uses only other machines, the backend of this machine."""
    if config.backend == "nodes":
        async with _ledger(config) as ledger:
            yield FleetNodes((), "on other machines", config.envs.image is not None, isolates=True, ledger=ledger)
        return
    async with (
        open_machine(config) as here,
        _ledger(config, can_detach=here.kind != "process") as ledger,
    ):
        isolates = here.node.backend.capabilities()["isolation"]
        yield FleetNodes((here.node,), here.what, here.kind == "docker", isolates, ledger, here.disks)


def image_lacks(image: str, cause: Cause) -> str:
    made = "" if image == GAMES_IMAGE else f" --base {image} --tag {image}{'' if ':' in image else ':1'}-envkit"
    return (
        f"image {image} cannot serve environments: it lacks envkit or Python ({cause}); build one with both: "
        f"{command('image', 'build', 'games')}{made}{', and name it in envs.image' if made else ''}"
    )


def keeps_ledger(config: ServeConfig) -> bool:
    """Whether this server writes its leases to a ledger, a file that a restarted server finds by its address."""
    listen = config.listen
    may_detach = config.backend == "nodes" or (config.backend != "none" and os.geteuid() == 0)
    return may_detach and (listen.socket is not None or listen.port != 0)


@asynccontextmanager
async def _ledger(config: ServeConfig, *, can_detach: bool = True) -> AsyncIterator[LeaseLedger | None]:
    """Open the ledger that belongs to this server's address; yield None if this server persists no leases."""
    if not keeps_ledger(config) or not can_detach:
        yield None
        return
    async with LeaseLedger(state_file(config, LEDGER)) as ledger:
        yield ledger


def state_file(config: ServeConfig, name: str) -> Path:
    """Return the path of a file of this server, in whose `name` ``{}`` stands for the server's address."""
    listen = config.listen
    address = f"{listen.host}-{listen.port}" if listen.socket is None else listen.socket
    return state_folder(config.state) / name.format(re.sub(r"[^A-Za-z0-9.-]+", "_", address).strip("_"))
