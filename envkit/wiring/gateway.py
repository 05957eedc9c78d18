"""The gateway: a pool of sandboxes, the environments that are played in some of them, and the server before both."""

from __future__ import annotations

import ipaddress
import math
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from envkit import clock
from envkit.config.serving import ServeConfig, StockSection
from envkit.errors import EnvkitError, UsageError
from envkit.fleet import FleetHost, Home, Homes, Probing, RestartBudget
from envkit.fleet.ledger import Ledger
from envkit.protocols import EnvHost, SandboxPool
from envkit.sandbox.health import Watch
from envkit.sandbox.nodes import Holds, Node
from envkit.sandbox.pool import Pool
from envkit.sandbox.stocks import Stock
from envkit.types import SandboxSpec, SandboxState
from envkit.wiring import boxes, envs, sandboxes
from envkit.wiring.tokens import state_folder

if TYPE_CHECKING:
    from envkit.http.guard import Served

_HERE = "here"
_ENV_BOX = ":envs-"
"""How the boxes that serve environments are called; callers' own names have no colon."""
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a gateway serves.

    Attributes:
        host: Where episodes are played.
        pool: Where sandboxes are lent; None where there are none.
        hosts: The parts of `host` that play in boxes.
    """

    host: EnvHost
    pool: Pool | None = None
    hosts: tuple[FleetHost, ...] = ()


@asynccontextmanager
async def open_fleet(config: ServeConfig, announce: Callable[[str], None]) -> AsyncIterator[Fleet]:
    """Start what `config` asks for, and stop it in the end.

    Args:
        config: What to start.
        announce: Told in one line what is used, and why if that is not the best.

    Raises:
        UsageError: This machine has no such sandboxes, or another server has their ledger; says what to do.
        SandboxError: No box came up; says why.
    """
    if config.backend == "none":
        async with envs.slots(config.envs.capacity) as host:
            yield Fleet(host)
        return
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(await boxes.choose(config.backend))
        ledger = await stack.enter_async_context(Ledger(place)) if (place := _ledger_of(config, backend)) else None
        env_box = sandboxes.env_box(config.backend, config.envs)
        pool = Pool(
            [Node(_HERE, backend, Holds(**config.node.model_dump()))],
            stocks=[Stock(env_box, config.envs.spares, _booted), *map(_stock, config.spares)],
            most=config.limits.sandboxes_per_tenant,
            watch=Watch(**config.silence.model_dump()),
            restarts=RestartBudget(config.restarts.budget, config.restarts.window_s),
            ledger=ledger,
        )
        await stack.enter_async_context(pool)
        hosts = [await stack.enter_async_context(_shared(config, pool, env_box))]
        host: EnvHost = hosts[0]
        if config.envs.own_boxes and not all(spec.shares for spec in envs.registered()):
            hosts.append(await stack.enter_async_context(_own(config, pool, env_box)))
            host = Homes(hosts[0], hosts[1], _shares)
        yield Fleet(host, pool, tuple(hosts))
