"""The boxes of a gateway in which environments are served, and the hosts that play in them."""

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
from envkit.wiring.gateway.capacity import described, env_boxes
from envkit.wiring.gateway.nodes import FleetNodes
from envkit.wiring.sandboxes import env_sandboxes

_ENV_BOX = ":envs-"
"""How the boxes that serve environments are called; the names that callers give have no colon."""
_DARK_S = 45.0
"""Seconds that episodes wait while no box is there: less than the 60 s that a client waits for an answer."""
_BOOT_CALL_S = 5.0
_BOOT_RETRY_S = 0.02


def alone() -> set[str]:
    """Return the environments whose episodes have a box of their own each."""
    return {spec.id for spec in environments.registered() if not spec.is_shareable}


def env_counts(config: ServeConfig, places: FleetNodes) -> tuple[int, int]:
    """Return how many boxes serve environments that share them, and how many those that do not.

    Raises:
        UsageError: They cannot all be held.
    """
    processors = len(os.sched_getaffinity(0))
    own = config.envs.max_dedicated_sandboxes if alone() else 0
    if not places.nodes:
        return config.envs.sandboxes or processors, own
    (node,) = places.nodes
    takes = ResourceRequest.of(env_box(config, places, 1))
    count = config.envs.sandboxes or env_boxes(node, takes, processors)
    room = node.room(takes)
    if count > room:
        raise UsageError(
            f"environments are served in {count} {'box' if count == 1 else 'boxes'} of {takes.memory_mib} MiB each, and"
            f" this machine holds together {described(node.holds)}: lower envs.sandboxes or envs.memory_mib, or"
            " raise what node says"
        )
    return count, max(int(min(own, room - count)), min(own, 1))


class EnvSandboxStarter:
    """Takes the boxes that serve environments out of a pool, first those that an earlier server left running."""

    def __init__(self, pool: Pool, spec: SandboxSpec, kind: str, most: int) -> None:
        self._pool = pool
        self._spec = spec
        self._kind = f"{_ENV_BOX}{kind}-"
        self._most = most
        self._left: list[str] | None = None
        self._was_full = False

    async def start(self) -> EnvSandbox:
        if self._left is None:
            found = [view.id for view in self._pool.views() if view.id.startswith(self._kind) and _is_alive(view)]
            self._left = found[: self._most]
            for name in found[self._most :]:  # fewer are wanted than before
                await self._pool.stop(name)
        while self._left:
            name = self._left.pop()
            if self._pool.view(name).spec == self._spec:
                return self._pool.get(name)
            await self._pool.stop(name)  # it was started with other settings
        name = f"{self._kind}{uuid.uuid4().hex[:8]}"
        try:
            # At first nobody waits, so that a server starts that has less room than it was told; then in turn.
            await self._pool.create(name, self._spec, wait_s=math.inf if self._was_full else None)
        except CapacityError:
            self._was_full = True
            raise
        return self._pool.get(name)


def env_host(
    config: ServeConfig, pool: Pool, places: FleetNodes, box: SandboxSpec, kind: str, *, boxes: int
) -> FleetHost:
    """Return the host that plays in boxes of one kind; in ``"own"`` ones a single episode each."""
    liveness, longest_s = config.liveness, config.limits.step_timeout_s
    return FleetHost(
        EnvSandboxStarter(pool, box, kind, boxes).start,
        partial(env_sandboxes.connect, longest_s),
        boxes=boxes,
        slots_per_sandbox=1 if kind == "own" else math.ceil(config.envs.capacity / boxes),
        episodes_per_sandbox=1 if kind == "own" else None,
        restarts=RestartBudget(config.restarts.budget, config.restarts.window_s),
        alert=partial(pool.alert, "restarts"),
        probing=HeartbeatTimes(
            liveness.interval_s, liveness.lost_s - liveness.interval_s, misses=1, longest_step_s=longest_s
        ),
        wait_timeout_s=_DARK_S,
        seats=places.ledger,
        replayable={spec.id for spec in environments.registered() if spec.replayable}.__contains__,
    )


async def forget_seats(ledger: Ledger | None, pool: Pool, *hosts: FleetHost) -> None:
    """Forget the episodes whose boxes did not outlive the server before us."""
    if ledger is None:
        return
    alive = {key for host in hosts for key in host.resumable_keys()}
    try:
        await ledger.forget([key for key in ledger.seated() if key not in alive])
    except EnvkitError as error:
        pool.alert("ledger", str(error))


def env_box(config: ServeConfig, places: FleetNodes, capacity: int) -> SandboxSpec:
    section = config.envs
    spec = env_sandboxes.env_box(capacity, in_image=places.in_image, image=section.image)
    return replace(spec, memory_mib=section.memory_mib, cpus=section.cpus)


async def booted(sandbox: Sandbox) -> None:
    """Return once the env server in a box answers."""
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
