"""The sandboxes of a gateway that serve environments, and the hosts that play in them."""

from __future__ import annotations

import math
import os
import uuid
from dataclasses import replace
from functools import partial

import anyio

from envkit.config.serving import ServeConfig
from envkit.errors import CapacityError, EnvkitError, UsageError
from envkit.fleet import EnvSandbox, FleetHost, HeartbeatTimes
from envkit.fleet.ledger import Ledger
from envkit.protocols import Sandbox
from envkit.restarts import RestartBudget
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import ResourceRequest
from envkit.types import SandboxSpec, SandboxState, SandboxView
from envkit.wiring import environments
from envkit.wiring.gateway.capacity import describe, env_sandbox_count
from envkit.wiring.gateway.nodes import FleetNodes
from envkit.wiring.sandboxes import env_sandboxes

_ENV_SANDBOX = ":envs-"
"""Prefix of the names of sandboxes that serve environments; names given by callers contain no colon."""
_NO_SANDBOX_TIMEOUT_S = 45.0
"""Seconds that episodes wait while no sandbox is running; must be below the client's timeout of 60 s."""
_BOOT_CALL_S = 5.0
_BOOT_RETRY_S = 0.02


def dedicated_env_ids() -> set[str]:
    """Return the ids of the environments that need a separate sandbox for each episode."""
    return {spec.id for spec in environments.registered() if not spec.is_shareable}


def sandbox_counts(config: ServeConfig, fleet_nodes: FleetNodes) -> tuple[int, int]:
    """Return how many shared and how many dedicated sandboxes serve environments.

    Raises:
        UsageError: The shared sandboxes exceed the capacity of the node.
    """
    processors = len(os.sched_getaffinity(0))
    own = config.envs.max_dedicated_sandboxes if dedicated_env_ids() else 0
    if not fleet_nodes.nodes:
        return config.envs.sandboxes or processors, own
    (node,) = fleet_nodes.nodes
    request = ResourceRequest.of(env_sandbox_spec(config, fleet_nodes, 1))
    count = config.envs.sandboxes or env_sandbox_count(node, request, processors)
    room = node.room(request)
    if count > room:
        raise UsageError(
            f"envs: {count} {'sandbox' if count == 1 else 'sandboxes'} of {request.memory_mib} MiB each exceed the "
            f"capacity of this machine ({describe(node.capacity)}); "
            "lower envs.sandboxes or envs.memory_mib, or raise node"
        )
    return count, max(int(min(own, room - count)), min(own, 1))


class EnvSandboxStarter:
    """Leases sandboxes that serve environments from a pool. Re-adopts those of an earlier server process first."""

    def __init__(self, pool: Pool, spec: SandboxSpec, kind: str, max_count: int) -> None:
        self._pool = pool
        self._spec = spec
        self._prefix = f"{_ENV_SANDBOX}{kind}-"
        self._max_count = max_count
        self._left_running: list[str] | None = None
        self._was_full = False

    async def start(self) -> EnvSandbox:
        if self._left_running is None:
            found = [view.id for view in self._pool.views() if view.id.startswith(self._prefix) and _is_alive(view)]
            self._left_running = found[: self._max_count]
            # Left over if the configured number is lower than that of the previous server.
            for name in found[self._max_count :]:
                await self._pool.stop(name)
        while self._left_running:
            name = self._left_running.pop()
            if self._pool.view(name).spec == self._spec:
                return self._pool.get(name)
            await self._pool.stop(name)  # it was started with other settings
        name = f"{self._prefix}{uuid.uuid4().hex[:8]}"
        try:
            # At the start, do not wait for capacity, so that a server on a smaller machine starts with fewer workers.
            await self._pool.create(name, self._spec, wait_s=math.inf if self._was_full else None)
        except CapacityError:
            self._was_full = True
            raise
        return self._pool.get(name)


def env_host(
    config: ServeConfig, pool: Pool, fleet_nodes: FleetNodes, spec: SandboxSpec, kind: str, *, count: int
) -> FleetHost:
    """Return a host for one kind of sandbox: ``"shared"``, or ``"own"``, which is used for a single episode."""
    liveness, longest_s = config.liveness, config.limits.step_timeout_s
    return FleetHost(
        EnvSandboxStarter(pool, spec, kind, count).start,
        partial(env_sandboxes.connect, longest_s),
        workers=count,
        slots_per_sandbox=1 if kind == "own" else math.ceil(config.envs.capacity / count),
        episodes_per_sandbox=1 if kind == "own" else None,
        restarts=RestartBudget(config.restarts.budget, config.restarts.window_s),
        alert=partial(pool.alert, "restarts"),
        heartbeat=HeartbeatTimes(
            liveness.interval_s, liveness.lost_s - liveness.interval_s, misses=1, longest_step_s=longest_s
        ),
        wait_timeout_s=_NO_SANDBOX_TIMEOUT_S,
        session_store=fleet_nodes.ledger,
        replayable={spec.id for spec in environments.registered() if spec.replayable}.__contains__,
    )


async def forget_lost_sessions(ledger: Ledger | None, pool: Pool, *hosts: FleetHost) -> None:
    """Remove sessions from the ledger if their sandboxes did not survive the restart of the server."""
    if ledger is None:
        return
    alive = {key for host in hosts for key in host.resumable_keys()}
    try:
        await ledger.forget(*(set(ledger.keys()) - alive))
    except EnvkitError as error:
        pool.alert("ledger", str(error))


def env_sandbox_spec(config: ServeConfig, fleet_nodes: FleetNodes, capacity: int) -> SandboxSpec:
    section = config.envs
    spec = env_sandboxes.env_sandbox_spec(capacity, in_image=fleet_nodes.in_image, image=section.image)
    return replace(spec, memory_mib=section.memory_mib, cpus=section.cpus)


async def wait_until_serving(sandbox: Sandbox) -> None:
    """Wait until the environment server in a sandbox answers."""
    while True:
        try:
            async with env_sandboxes.connect(_BOOT_CALL_S, sandbox) as client:
                await client.health()
                return
        except EnvkitError as error:
            if not error.retry:
                raise
        await anyio.sleep(_BOOT_RETRY_S)


def _is_alive(view: SandboxView) -> bool:
    return view.state in (SandboxState.LEASED, SandboxState.SUSPECT)
