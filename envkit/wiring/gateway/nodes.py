"""The nodes of a gateway and the ledger of its leases."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from envkit import clock
from envkit.config.serving import ServeConfig
from envkit.errors import UsageError
from envkit.fleet.ledger import LeaseLedger
from envkit.installation import command
from envkit.sandbox import machine
from envkit.sandbox.docker.backend import GAMES_IMAGE, DockerBackend
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.process.backend import ProcessBackend
from envkit.types import Cause
from envkit.wiring.gateway.token_store import LEDGER, state_folder
from envkit.wiring.sandboxes.backends import choose

_HERE = "here"


@dataclass(frozen=True, slots=True)
class FleetNodes:
    """The nodes of a gateway at start.

    Attributes:
        nodes: The nodes; empty for Ray, which adds them later.
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
async def open_nodes(config: ServeConfig) -> AsyncIterator[FleetNodes]:
    """Open the ledger and the backend of this machine. With Ray, open only the ledger."""
    if config.backend == "ray":
        async with _ledger(config) as ledger:
            what = f"{config.ray.kind} on the nodes of a Ray cluster"
            yield FleetNodes((), what, config.ray.kind == "docker", isolates=True, ledger=ledger)
        return
    assert config.backend != "none"
    image = config.envs.image or GAMES_IMAGE
    backend, what, why, _ = await choose(config.backend, image=image, may_be_process=True)
    async with _ledger(config, can_detach=not isinstance(backend, ProcessBackend)) as ledger, backend:
        found = await clock.to_thread(machine.this_machine)
        # Ask Docker for the memory, because its daemon may run on another machine.
        if isinstance(backend, DockerBackend):
            if why_not := await backend.why_unusable(image):
                raise UsageError(f"envs.image: {why_not}")
            found = replace(found, memory_mib=backend.machine_memory_mib)
        limits = Capacity(sandboxes=config.node.max_sandboxes, **config.node.model_dump(exclude={"max_sandboxes"}))
        node = Node(_HERE, backend, machine.with_defaults(limits, found))
        isolates = backend.capabilities()["isolation"]
        what += why
        in_image = isinstance(backend, DockerBackend)
        yield FleetNodes((node,), what, in_image, isolates=isolates, ledger=ledger, disks=backend.disks)


def image_lacks(image: str, cause: Cause) -> str:
    made = "" if image == GAMES_IMAGE else f" --base {image} --tag {image}{'' if ':' in image else ':1'}-envkit"
    return (
        f"image {image} cannot serve environments: it lacks envkit or Python ({cause}); build one with both: "
        f"{command('image', 'build', 'games')}{made}{', and name it in envs.image' if made else ''}"
    )


def keeps_ledger(config: ServeConfig) -> bool:
    """Whether this server writes its leases to a ledger, a file that a restarted server finds by its address."""
    listen = config.listen
    return config.backend != "none" and os.geteuid() == 0 and (listen.socket is not None or listen.port != 0)


@asynccontextmanager
async def _ledger(config: ServeConfig, *, can_detach: bool = True) -> AsyncIterator[LeaseLedger | None]:
    """Open the ledger that belongs to this server's address; yield None if this server persists no leases."""
    listen = config.listen
    if not keeps_ledger(config) or not can_detach:
        yield None
        return
    address = f"{listen.host}-{listen.port}" if listen.socket is None else listen.socket
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", address).strip("_")
    async with LeaseLedger(state_folder(config.state) / LEDGER.format(name)) as ledger:
        yield ledger
