"""The machine of a gateway and the ledger of its leases."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
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
        node: Its node in a pool, with an open backend; None if the gateway uses only other machines.
        kind: Kind of the backend; without a node, the kind that those of other machines have.
        what: Short description of the backend, for start messages.
        disks: Returns, for each disk by name, its free MiB and the MiB that must stay free; None without a node.
    """

    node: Node | None
    kind: Kind
    what: str
    disks: Callable[[], Mapping[str, tuple[int, int]]] | None = None

    @property
    def in_image(self) -> bool:
        """Whether the sandboxes run in a Docker image."""
        return self.kind == "docker"

    @property
    def isolates(self) -> bool:
        """Whether sandboxes are isolated from this process."""
        return self.node is None or self.node.backend.capabilities()["isolation"]


@asynccontextmanager
async def open_machine(config: ServeConfig) -> AsyncIterator[Machine]:
    """Open the backend of this machine, unless it is not used, and find out its capacity.

    Raises:
        UsageError: The backend does not work here, or its image is missing; the message says what to do.
    """
    assert config.backend != "none"
    if config.backend == "nodes":
        yield Machine(None, "local" if config.envs.image is None else "docker", "on other machines")
        return
    image = config.envs.image or GAMES_IMAGE
    backend, what, why, _ = await choose(config.backend, image=image, may_be_process=True)
    async with backend:
        found = await clock.to_thread(machine.this_machine)
        kind: Kind = "process" if isinstance(backend, ProcessBackend) else "local"
        # Ask Docker for the memory, because its daemon may run on another machine.
        if isinstance(backend, DockerBackend):
            kind = "docker"
            if why_not := await docker.why_unavailable(image):
                raise UsageError(f"envs.image: {why_not}")
            found = replace(found, memory_mib=backend.machine_memory_mib)
        limits = Capacity(sandboxes=config.node.max_sandboxes, **config.node.model_dump(exclude={"max_sandboxes"}))
        yield Machine(Node(HERE, backend, machine.with_defaults(limits, found)), kind, what + why, backend.disks)


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


def ledger_of(config: ServeConfig, here: Machine) -> LeaseLedger | None:
    """Return the ledger that belongs to this server's address, not yet open; None if it persists no leases."""
    return LeaseLedger(state_file(config, LEDGER)) if keeps_ledger(config) and here.kind != "process" else None


def state_file(config: ServeConfig, name: str) -> Path:
    """Return the path of a file of this server, in whose `name` ``{}`` stands for the server's address."""
    listen = config.listen
    address = f"{listen.host}-{listen.port}" if listen.socket is None else listen.socket
    return state_folder(config.state) / name.format(re.sub(r"[^A-Za-z0-9.-]+", "_", address).strip("_"))
