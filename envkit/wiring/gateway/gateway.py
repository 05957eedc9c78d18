"""The gateway: a pool of sandboxes, the environments that are played in some of them, and the server before both."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from envkit.config.serving import LimitsSection, ServeConfig, WarmSection
from envkit.errors import SandboxStartError, UsageError
from envkit.fleet import FleetHost, RoutedHosts
from envkit.fleet.alerts import send_alerts, warn_if_unreachable, watch_disks
from envkit.fleet.autoscale import autoscale, run_command
from envkit.http.api.app import create_app
from envkit.http.auth.rate_limit import Rate
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.http.auth.tokens import TokenStore
from envkit.http.limits.memory_budget import MemoryBudget
from envkit.http.sandboxes.snapshot_quota import SnapshotBounds
from envkit.http.server.access_log import AccessLog
from envkit.http.server.middleware import AuthMiddleware
from envkit.http.server.server import require_address, serve
from envkit.installation import command
from envkit.protocols import EnvHost
from envkit.restarts import RestartBudget
from envkit.sandbox.docker.backend import DEFAULT_IMAGE
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import LivenessTimes
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.sandbox.ray.node_watcher import RayNodes
from envkit.sandbox.transfer import tar_stream
from envkit.types import Cause, CauseKind, SandboxSpec
from envkit.wiring import environments
from envkit.wiring.gateway import capacity, metrics
from envkit.wiring.gateway.env_workers import alone, booted, env_box, env_counts, env_host, forget_seats
from envkit.wiring.gateway.nodes import image_lacks, keeps_ledger, open_nodes
from envkit.wiring.gateway.token_store import lock_state, open_tokens

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a gateway serves.

    Attributes:
        host: Where episodes are played.
        pool: Where sandboxes are lent; None where there are none.
        disks: Says of the disks that sandboxes need how many MiB are free and how many must be; None where it cannot.
        hosts: The parts of `host` that play in boxes.
        scale: Told how many more sandboxes there should be room for; None where nobody is.
        isolates: Whether what runs in a sandbox is kept away from this process.
    """

    host: EnvHost
    pool: Pool | None = None
    disks: Callable[[], Mapping[str, tuple[int, int]]] | None = None
    hosts: tuple[FleetHost, ...] = ()
    scale: Callable[[int], Awaitable[None]] | None = None
    isolates: bool = True


async def serve_fleet(
    config: ServeConfig, *, announce: Callable[[str], None], on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve a fleet until SIGTERM, SIGINT or cancellation; then finish what runs and end every sandbox.

    The first signal counts, also one that comes while the fleet is started; further ones are ignored for as long as the
    loop lives, since who is killed at its end leaves sandboxes behind.

    Args:
        config: What to serve.
        announce: Told, in one line each, what people should know at the start.
        on_ready: Called once with the address, as soon as requests are answered.

    Raises:
        UsageError: The address, the state or the backend cannot be used; says what to do.
        SandboxError: No box came up; says why.
    """
    listen, limits = config.listen, config.limits
    certificate = None if listen.certificate is None else Path(listen.certificate)
    key = None if listen.key is None else Path(listen.key)
    require_address(listen.host, listen.port, listen.socket, certificate, key)
    tokens = _tokens(config)
    if tokens.is_needed():
        announce(f"tokens: every caller needs one ({command('token', 'create', '--tenant', 'NAME')})")
    rate = None if limits.calls_per_s is None else Rate(limits.calls_per_s, burst=max(limits.calls_per_s, 1.0))
    end = _End()
    end.on_signals()
    with tokens, _state(config), _access_log(config) or nullcontext() as log, end.by_signals():
        async with open_fleet(config, announce) as fleet, _telling(config, fleet, announce):
            app = create_app(
                fleet.host,
                envs=environments.registered,
                ttl_s=limits.session_ttl_s,
                step_timeout_s=limits.step_timeout_s,
                tenant_share=limits.tenant_share,
                max_request_bytes=limits.request_bytes,
                pool=fleet.pool,
                trees=tar_stream,
                sandbox_ttl_s=limits.sandbox_ttl_s,
                permits=SandboxPolicy(limits.networks, limits.profiles, limits.images, fleet.isolates),
                snapshots=SnapshotBounds(
                    limits.snapshots_per_tenant,
                    limits.snapshots_mib_per_tenant,
                    limits.snapshots,
                    limits.snapshots_mib,
                ),
                metrics=partial(_metrics, fleet, log),
            )
            with end.by_signals():
                await serve(
                    AuthMiddleware(app, tokens, rate=rate, bodies=_bodies(limits), log=log, errors=app.errors),
                    host=listen.host,
                    port=listen.port,
                    uds=listen.socket,
                    certificate=certificate,
                    key=key,
                    on_ready=on_ready,
                    handle_signals=False,
                )


class _End:
    """What SIGTERM and SIGINT do."""

    def __init__(self) -> None:
        self._scope: anyio.CancelScope | None = None

    def on_signals(self) -> None:
        """Hear signals for as long as the loop lives."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._cancel)

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Let a signal end the block, quietly; outside of it, or of the one within it, signals do nothing more."""
        with anyio.CancelScope() as self._scope:
            try:
                yield
            finally:
                self._scope = None

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()


@asynccontextmanager
async def _telling(config: ServeConfig, fleet: Fleet, announce: Callable[[str], None]) -> AsyncIterator[None]:
    """Tell people and programs what the fleet needs, for the length of the block."""
    pool, scale = fleet.pool, fleet.scale
    if config.autoscale.command is not None:
        scale = partial(run_command, config.autoscale.command)
    tasks = await anyio.create_task_group().__aenter__()
    if pool is not None and config.alerts.webhook is not None:
        tasks.start_soon(warn_if_unreachable, config.alerts.webhook, announce)
        tasks.start_soon(send_alerts, pool.events(), config.alerts.webhook)
    if pool is not None and scale is not None:
        tasks.start_soon(autoscale, pool.wanted, scale, config.autoscale.interval_s)
    if pool is not None and fleet.disks is not None:
        tasks.start_soon(watch_disks, fleet.disks, pool.alert)
    try:
        yield
    finally:
        tasks.cancel_scope.cancel()
        # Not told of the block's own error, which it would wrap in a group.
        await tasks.__aexit__(None, None, None)


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
        announce(f"sandboxes: none, {config.envs.capacity} episodes at once in this process")
        async with environments.slots(config.envs.capacity) as slots:
            yield Fleet(slots)
        return
    async with AsyncExitStack() as stack:
        places = await stack.enter_async_context(open_nodes(config))
        count, own_count = env_counts(config, places)
        shared_box = env_box(config, places, math.ceil(config.envs.capacity / count))
        pool = Pool(
            places.nodes,
            stocks=[WarmSpec(shared_box, config.envs.warm, booted), *map(_stock, config.warm)],
            most=config.limits.sandboxes_per_tenant,
            share=config.limits.tenant_share,
            watch=LivenessTimes(**config.liveness.model_dump()),
            restarts=RestartBudget(config.restarts.budget, config.restarts.window_s),
            ledger=places.ledger,
        )
        scale = None
        if config.backend == "ray":
            ray = RayNodes(pool.add_node, pool.remove_node, address=config.ray.address, kind=config.ray.kind)
            scale = (await stack.enter_async_context(ray)).request
        await stack.enter_async_context(pool)
        try:
            shared = await stack.enter_async_context(env_host(config, pool, places, shared_box, "shared", boxes=count))
        except SandboxStartError as error:
            if places.in_image and _lacks_envkit(error.cause):
                raise UsageError(image_lacks(shared_box.image or DEFAULT_IMAGE, error.cause)) from None
            raise
        announce(f"sandboxes: {places.what}; environments in {count} {'box' if count == 1 else 'boxes'}")
        for node in places.nodes:
            share = f"{config.limits.tenant_share:.0%}".removesuffix("%")
            announce(f"room: {capacity.described(node.holds)}; of each a tenant may have {share} % (node, limits)")
        if not own_count:
            await forget_seats(places.ledger, pool, shared)
            yield Fleet(shared, pool, places.disks, (shared,), scale, places.isolates)
            return
        ids = alone()
        own_box = env_box(config, places, 1)
        own = await stack.enter_async_context(env_host(config, pool, places, own_box, "own", boxes=own_count))
        await forget_seats(places.ledger, pool, shared, own)
        homes = RoutedHosts(shared, own, lambda env_id: env_id not in ids)
        yield Fleet(homes, pool, places.disks, (shared, own), scale, places.isolates)


def _lacks_envkit(cause: Cause) -> bool:
    """Say whether a box did not start because its image cannot serve environments."""
    if cause.kind is CauseKind.IMAGE_UNUSABLE:
        return True
    return "No module named 'envkit" in cause.detail  # library's message: CPython


def _stock(section: WarmSection) -> WarmSpec:
    wanted = section.model_dump(exclude={"count"})
    return WarmSpec(SandboxSpec(**wanted), section.count)


def _metrics(fleet: Fleet, log: AccessLog | None) -> Iterator[Metric]:
    if fleet.pool is not None:
        yield from metrics.collect(fleet.pool, fleet.hosts)
    if log is not None:
        yield from metrics.of_log(log.dropped)


def _bodies(limits: LimitsSection) -> MemoryBudget:
    most_mib = limits.max_buffered_mib or capacity.bodies_mib(capacity.this_machine())
    return MemoryBudget(most_mib << 20, limits.tenant_share)


def _tokens(config: ServeConfig) -> TokenStore:
    """Return whom to let in: everybody until there is a token, which is for callers on this machine alone.

    Raises:
        UsageError: Others could come, and there are no tokens.
    """
    store = open_tokens(config.state)
    if not store.is_needed() and config.listen.socket is None and not _is_loopback(config.listen.host):
        store.close()
        raise UsageError(
            f"{config.listen.host} can be reached by others, and there are no tokens: make one with "
            f"'{command('token', 'create', '--tenant', 'NAME')}', or listen on 127.0.0.1"
        )
    return store


def _state(config: ServeConfig) -> AbstractContextManager[object]:
    """Keep other servers out of the folder of state, if ours is named or holds our ledger.

    Raises:
        UsageError: Another server has it.
    """
    return lock_state(config.state) if config.state is not None or keeps_ledger(config) else nullcontext()


def _access_log(config: ServeConfig) -> AccessLog | None:
    """Raises:
    UsageError: The file cannot be written.
    """
    if config.access_log is None:
        return None
    path = None if config.access_log == "-" else Path(config.access_log)
    try:
        return AccessLog.to(path)
    except OSError as error:
        raise UsageError(f"access_log: {path} cannot be written: {error.strerror or error}") from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
