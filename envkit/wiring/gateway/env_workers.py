"""Starts the sandboxes in which a gateway runs environments, and creates the hosts that play episodes in them."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from envkit.config.serving import ServeConfig
from envkit.errors import EnvkitError, UsageError
from envkit.fleet import FleetHost, HeartbeatTimes
from envkit.fleet.env_worker import connect_when_serving
from envkit.fleet.host import WorkerKind
from envkit.fleet.ledger import LeaseLedger
from envkit.fleet.routing import Offenders
from envkit.protocols import Sandbox
from envkit.sandbox.machine import describe, env_sandbox_count
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import ResourceRequest
from envkit.types import SandboxSpec
from envkit.wiring import environments
from envkit.wiring.gateway.nodes import FleetNodes
from envkit.wiring.sandboxes import env_sandboxes

_SUSPECT_SANDBOXES = 2
_OWN_SANDBOXES = 4
"""Maximum number of sandboxes that play one episode each."""
NO_WORKER_TIMEOUT_S = 45.0
"""Seconds that episodes wait while no sandbox is running; should be below the timeout of a reset."""
_BOOT_CALL_S = 5.0


def sandbox_counts(config: ServeConfig, fleet_nodes: FleetNodes) -> tuple[int, int]:
    """Return the number of sandboxes that play several episodes at once, and the maximum number that play one each.

    Raises:
        UsageError: The shared sandboxes exceed the capacity of the node.
    """
    processors = len(os.sched_getaffinity(0))
    if not fleet_nodes.nodes:
        return config.envs.sandboxes or processors, _OWN_SANDBOXES
    (node,) = fleet_nodes.nodes
    request = ResourceRequest.of(env_sandbox_spec(config, fleet_nodes, 1))
    count = config.envs.sandboxes or env_sandbox_count(node, request, processors)
    room = node.room(request)
    if count > room:
        raise UsageError(
            f"envs: {count} {'sandbox' if count == 1 else 'sandboxes'} of {request.memory_mib} MiB each exceed the "
            f"capacity of this machine ({describe(node.capacity)}); "
            "lower envs.sandboxes or envs.memory_mib, or raise the limits in node"
        )
    return count, max(int(min(_OWN_SANDBOXES, room - count)), 1)


class EnvHosts(NamedTuple):
    """The hosts of a gateway.

    Attributes:
        shared: Host whose sandboxes play many episodes each.
        own: Host whose sandboxes play one episode each and are then replaced; they start on demand.
        suspects: Host whose sandboxes retry calls that may have killed a shared sandbox; they start on demand.
    """

    shared: FleetHost
    own: FleetHost
    suspects: FleetHost


@asynccontextmanager
async def env_hosts(
    config: ServeConfig, pool: Pool, fleet_nodes: FleetNodes, offenders: Offenders, *, count: int, own_count: int
) -> AsyncIterator[EnvHosts]:
    """Open the hosts with `count` shared sandboxes and up to `own_count` sandboxes for single episodes.

    Raises:
        SandboxStartError: No shared sandbox started.
    """
    liveness, limits, longest_s = config.liveness, config.limits, config.limits.step_timeout_s
    slow_s = max(limits.reset_timeout_s, limits.grade_timeout_s)
    slots = math.ceil(config.envs.capacity / count)

    def host(kind: WorkerKind, workers: int, slots_each: int = 1, suspects: FleetHost | None = None) -> FleetHost:
        # Sandboxes of `suspects` need only one slot, but get the spec of shared ones, so that warm ones can be used.
        return FleetHost(
            pool,
            env_sandbox_spec(config, fleet_nodes, 1 if kind == "own" else slots),
            partial(env_sandboxes.connect, longest_s, slow_timeout_s=slow_s),
            kind=kind,
            workers=workers,
            slots_per_sandbox=slots_each,
            restarts=config.restarts.limit(),
            heartbeat=HeartbeatTimes(liveness.interval_s, liveness.lost_s, longest_s),
            wait_timeout_s=NO_WORKER_TIMEOUT_S,
            replayable=environments.is_replayable,
            session_store=fleet_nodes.ledger,
            suspects=suspects,
            offenders=offenders,
        )

    async with (
        host("suspect", _SUSPECT_SANDBOXES) as suspects,
        host("shared", count, slots, suspects if slots > 1 else None) as shared,
        host("own", own_count) as own,
    ):
        yield EnvHosts(shared, own, suspects)


async def forget_lost_sessions(ledger: LeaseLedger | None, pool: Pool, *hosts: FleetHost) -> None:
    """Delete from the ledger, after a restart of the server, the sessions whose sandboxes no longer exist."""
    if ledger is None:
        return
    alive = {key for host in hosts for key in host.resumable_keys()}
    try:
        await ledger.forget(*(set(ledger.keys()) - alive))
    except EnvkitError as error:
        pool.alert("ledger", str(error))


def env_sandbox_spec(config: ServeConfig, fleet_nodes: FleetNodes, capacity: int) -> SandboxSpec:
    section = config.envs
    spec = env_sandboxes.env_sandbox_spec(
        capacity,
        in_image=fleet_nodes.in_image,
        image=section.image,
        sees_data=bool(fleet_nodes.nodes) and fleet_nodes.isolates,  # the nodes of a Ray cluster are other machines
    )
    return replace(spec, memory_mib=section.memory_mib, cpus=section.cpus)


async def wait_until_serving(sandbox: Sandbox) -> None:
    """Wait until the environment server in a sandbox answers."""
    async with connect_when_serving(partial(env_sandboxes.connect, _BOOT_CALL_S), sandbox):
        pass
