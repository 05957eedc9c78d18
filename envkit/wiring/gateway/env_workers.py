"""The host that plays episodes in sandboxes of a gateway."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial

from envkit.config.serving import ServeConfig
from envkit.errors import EnvkitError, UsageError
from envkit.fleet import FleetHost, WorkerStart
from envkit.fleet.env_worker import ConnectSandbox, connect_when_serving
from envkit.fleet.ledger import LeaseLedger
from envkit.fleet.suspects import Offenders
from envkit.protocols import Sandbox
from envkit.sandbox.machine import describe, env_sandbox_count
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import ResourceRequest
from envkit.types import SandboxSpec
from envkit.wiring import environments
from envkit.wiring.gateway.nodes import Machine
from envkit.wiring.sandboxes import env_sandboxes

_EXTRA_SANDBOXES = 4
"""Maximum number of sandboxes that play one episode each."""
_ISOLATED = 2
"""Maximum number of isolated episodes, so that there are always extra sandboxes for suspect calls."""
NO_WORKER_TIMEOUT_S = 45.0
"""Seconds that episodes wait while no sandbox is running; should be below the timeout of a reset."""
_BOOT_CALL_S = 5.0


def sandbox_count(config: ServeConfig, here: Machine, processors_elsewhere: int) -> int:
    """Return the number of sandboxes that serve environments, with as many processors on other machines.

    Raises:
        UsageError: The sandboxes exceed the capacity of this machine, and there are no other machines.
    """
    if here.node is None:
        return config.envs.sandboxes or max(processors_elsewhere, 1)
    request = ResourceRequest.of(env_sandbox_spec(config, here, 1))
    count = config.envs.sandboxes or env_sandbox_count(here.node, request, len(os.sched_getaffinity(0)))
    if processors_elsewhere:
        return config.envs.sandboxes or count + processors_elsewhere
    if count > here.node.room(request):
        raise UsageError(
            f"envs: {count} {'sandbox' if count == 1 else 'sandboxes'} of {request.memory_mib} MiB each exceed the "
            f"capacity of this machine ({describe(here.node.capacity)}); "
            "lower envs.sandboxes or envs.memory_mib, or raise the limits in node"
        )
    return count


def env_host(config: ServeConfig, pool: Pool, here: Machine, ledger: LeaseLedger | None, *, count: int) -> FleetHost:
    """Return the host that plays episodes in `count` sandboxes of `pool`, and in extra ones."""
    slots = math.ceil(config.envs.capacity / count)
    return FleetHost(
        pool,
        WorkerStart(env_sandbox_spec(config, here, slots), connector(config)),
        workers=count,
        slots_per_sandbox=slots,
        longest_step_s=config.limits.step_timeout_s,
        wait_timeout_s=NO_WORKER_TIMEOUT_S,
        replayable=environments.is_replayable,
        session_store=ledger,
        extra=_EXTRA_SANDBOXES,
        offenders=Offenders(config.restarts.limit(), max_isolated=_ISOLATED),
    )


def connector(config: ServeConfig) -> ConnectSandbox:
    """Return a function that opens clients of environment servers with the limits of `config`."""
    limits = config.limits
    slow_s = max(limits.reset_timeout_s, limits.grade_timeout_s)
    return partial(env_sandboxes.connect, limits.step_timeout_s, slow_timeout_s=slow_s)


async def forget_lost_sessions(ledger: LeaseLedger | None, pool: Pool, host: FleetHost) -> None:
    """Delete from the ledger, after a restart of the server, the sessions whose sandboxes no longer exist."""
    if ledger is None:
        return
    try:
        await ledger.forget(*(set(ledger.records) - set(host.resumable_keys())))
    except EnvkitError as error:
        pool.alert("ledger", str(error))


def env_sandbox_spec(config: ServeConfig, here: Machine, capacity: int) -> SandboxSpec:
    section = config.envs
    spec = env_sandboxes.env_sandbox_spec(
        capacity,
        in_image=here.in_image,
        image=section.image,
        sees_data=here.node is not None and here.isolates,  # those of other machines may be elsewhere
    )
    return replace(spec, memory_mib=section.memory_mib, cpus=section.cpus)


async def wait_until_serving(sandbox: Sandbox) -> None:
    """Wait until the environment server in a sandbox answers."""
    async with connect_when_serving(partial(env_sandboxes.connect, _BOOT_CALL_S), sandbox):
        pass
