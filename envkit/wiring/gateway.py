"""The gateway: a pool of sandboxes, the environments that are played in some of them, and the server before both."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import re
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio

from envkit.config.serving import ServeConfig, StockSection
from envkit.errors import EnvkitError, UsageError
from envkit.fleet import FleetHost, Home, Homes, Probing
from envkit.fleet.alerts import send_alerts
from envkit.fleet.autoscale import autoscale, run_command
from envkit.fleet.ledger import Ledger
from envkit.http.access_log import AccessLog
from envkit.http.app import create_app
from envkit.http.guard import Guard
from envkit.http.permits import Permits
from envkit.http.rates import Rate
from envkit.http.server import require_address, serve
from envkit.http.tokens import TokenStore
from envkit.protocols import EnvHost, Sandbox
from envkit.restarts import RestartBudget
from envkit.sandbox import trees
from envkit.sandbox.docker import DockerBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import Watch
from envkit.sandbox.pool.nodes import Holds, Node
from envkit.sandbox.pool.stocks import Stock
from envkit.sandbox.process import ProcessBackend
from envkit.sandbox.ray.nodes import RayNodes
from envkit.types import SandboxSpec, SandboxState, SandboxView
from envkit.wiring import envs, fleet_metrics, sandboxes
from envkit.wiring.tokens import open_tokens, state_folder

_HERE = "here"
_ENV_BOX = ":envs-"
"""How the boxes that serve environments are called; the names that callers give have no colon."""
_CALL_S = 60.0
_BOOT_CALL_S = 5.0
_BOOT_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a gateway serves.

    Attributes:
        host: Where episodes are played.
        pool: Where sandboxes are lent; None where there are none.
        hosts: The parts of `host` that play in boxes.
        scale: Told how many more sandboxes there should be room for; None where nobody is.
        isolates: Whether what runs in a sandbox is kept away from this process.
    """

    host: EnvHost
    pool: Pool | None = None
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
    if tokens is not None:
        announce("tokens: every caller needs one (envkit token create)")
    rate = None if limits.calls_per_s is None else Rate(limits.calls_per_s, burst=max(limits.calls_per_s, 1.0))
    end = _End()
    end.on_signals()
    with _access_log(config) or nullcontext() as log, end.by_signals():
        async with open_fleet(config, announce) as fleet, _telling(config, fleet):
            app = create_app(
                fleet.host,
                envs=envs.registered,
                ttl_s=limits.session_ttl_s,
                step_timeout_s=limits.step_timeout_s,
                max_request_bytes=limits.request_bytes,
                pool=fleet.pool,
                trees=trees,
                sandbox_ttl_s=limits.sandbox_ttl_s,
                permits=Permits(limits.networks, limits.profiles, limits.images, fleet.isolates),
                metrics=None if fleet.pool is None else partial(fleet_metrics.collect, fleet.pool, fleet.hosts),
            )
            with end.by_signals():
                await serve(
                    Guard(app, tokens, rate=rate, log=log),
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
async def _telling(config: ServeConfig, fleet: Fleet) -> AsyncIterator[None]:
    """Tell people and programs what the fleet needs, for the length of the block."""
    pool, scale = fleet.pool, fleet.scale
    if config.autoscale.command is not None:
        scale = partial(run_command, config.autoscale.command)
    tasks = await anyio.create_task_group().__aenter__()
    if pool is not None and config.alerts.webhook is not None:
        tasks.start_soon(send_alerts, pool.events(), config.alerts.webhook)
    if pool is not None and scale is not None:
        tasks.start_soon(autoscale, pool.wanted, scale, config.autoscale.interval_s)
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
        async with envs.slots(config.envs.capacity) as slots:
            yield Fleet(slots)
        return
    count = config.envs.boxes or len(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        places = await stack.enter_async_context(_places(config))
        shared_box = _env_box(config, places, math.ceil(config.envs.capacity / count))
        pool = Pool(
            places.nodes,
            stocks=[Stock(shared_box, config.envs.spares, _booted), *map(_stock, config.spares)],
            most=config.limits.sandboxes_per_tenant,
            watch=Watch(**config.silence.model_dump()),
            restarts=RestartBudget(config.restarts.budget, config.restarts.window_s),
            ledger=places.ledger,
        )
        scale = None
        if config.backend == "ray":
            ray = RayNodes(pool.add_node, pool.remove_node, address=config.ray.address, kind=config.ray.kind)
            scale = (await stack.enter_async_context(ray)).request
        await stack.enter_async_context(pool)
        shared = await stack.enter_async_context(_host(config, pool, places, shared_box, "shared", boxes=count))
        announce(f"sandboxes: {places.what}; environments in {count} {'box' if count == 1 else 'boxes'}")
        alone = {spec.id for spec in envs.registered() if not spec.shares}
        if not config.envs.own_boxes or not alone:
            yield Fleet(shared, pool, (shared,), scale, places.isolates)
            return
        own_box = _env_box(config, places, 1)
        own = await stack.enter_async_context(_host(config, pool, places, own_box, "own", boxes=config.envs.own_boxes))
        yield Fleet(Homes(shared, own, lambda env_id: env_id not in alone), pool, (shared, own), scale, places.isolates)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where boxes are started: the nodes that there are at first, what to call them, whether environments need an image
    there, whether what runs there is kept away from this process, and where leases are written down.
    """

    nodes: Sequence[Node]
    what: str
    in_image: bool
    isolates: bool
    ledger: Ledger | None


@asynccontextmanager
async def _places(config: ServeConfig) -> AsyncIterator[_Places]:
    """Open the backend of this machine, if it is this machine's, and the ledger."""
    if config.backend == "ray":
        async with _ledger(config) as ledger:
            what = f"{config.ray.kind} on the nodes of a Ray cluster"
            yield _Places((), what, config.ray.kind == "docker", isolates=True, ledger=ledger)
        return
    assert config.backend != "none"
    backend, what, why = await sandboxes.choose(config.backend)
    async with _ledger(config, can_stay=not isinstance(backend, ProcessBackend)) as ledger, backend:
        node = Node(_HERE, backend, Holds(**config.node.model_dump()))
        isolates = backend.capabilities()["isolation"]
        yield _Places((node,), what + why, isinstance(backend, DockerBackend), isolates=isolates, ledger=ledger)


@asynccontextmanager
async def _ledger(config: ServeConfig, *, can_stay: bool = True) -> AsyncIterator[Ledger | None]:
    """Open where leases are written down, one file an address; nothing where sandboxes cannot outlive us, or the next
    server would not find the file.
    """
    listen = config.listen
    if os.geteuid() != 0 or not can_stay or (listen.socket is None and listen.port == 0):
        yield None
        return
    address = f"{listen.host}-{listen.port}" if listen.socket is None else listen.socket
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", address).strip("_")
    async with Ledger(state_folder(_state(config)) / f"fleet-{name}.sqlite") as ledger:
        yield ledger


class _EnvBoxes:
    """Takes the boxes that serve environments out of a pool, first those that an earlier server left running."""

    def __init__(self, pool: Pool, spec: SandboxSpec, kind: str, most: int) -> None:
        self._pool = pool
        self._spec = spec
        self._kind = f"{_ENV_BOX}{kind}-"
        self._most = most
        self._left: list[str] | None = None

    async def start(self) -> Home:
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
        await self._pool.create(name, self._spec)
        return self._pool.get(name)


def _host(config: ServeConfig, pool: Pool, places: _Places, box: SandboxSpec, kind: str, *, boxes: int) -> FleetHost:
    """Return the host that plays in boxes of one kind; in ``"own"`` ones a single episode each."""
    silence = config.silence
    return FleetHost(
        _EnvBoxes(pool, box, kind, boxes).start,
        partial(sandboxes.connect, _CALL_S),
        boxes=boxes,
        slots_per_box=1 if kind == "own" else math.ceil(config.envs.capacity / boxes),
        episodes_per_box=1 if kind == "own" else None,
        restarts=RestartBudget(config.restarts.budget, config.restarts.window_s),
        probing=Probing(silence.interval_s, silence.lost_s - silence.interval_s, misses=1),
        seats=places.ledger,
        replayable={spec.id for spec in envs.registered() if spec.replayable}.__contains__,
    )


def _env_box(config: ServeConfig, places: _Places, capacity: int) -> SandboxSpec:
    section = config.envs
    spec = sandboxes.env_box(capacity, in_image=places.in_image, image=section.image)
    return replace(spec, memory_mib=section.memory_mib, cpus=section.cpus)


async def _booted(sandbox: Sandbox) -> None:
    """Return once the env server in a box answers."""
    while True:
        try:
            async with sandboxes.connect(_BOOT_CALL_S, sandbox) as client:
                await client.health()
                return
        except EnvkitError as error:
            if not error.retry:
                raise
        await anyio.sleep(_BOOT_RETRY_S)


def _stock(section: StockSection) -> Stock:
    wanted = section.model_dump(exclude={"count"})
    return Stock(SandboxSpec(**wanted), section.count)


def _is_alive(view: SandboxView) -> bool:
    return view.state in (SandboxState.LEASED, SandboxState.SUSPECT)


def _tokens(config: ServeConfig) -> TokenStore | None:
    """Return whom to let in; None for everybody, which is for callers on this machine alone.

    Raises:
        UsageError: Others could come, and there are no tokens.
    """
    store = open_tokens(_state(config))
    if store.list():
        return store
    store.close()
    if config.listen.socket is None and not _is_loopback(config.listen.host):
        raise UsageError(
            f"{config.listen.host} can be reached by others, and there are no tokens: make one with "
            "'envkit token create', or listen on 127.0.0.1"
        )
    return None


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


def _state(config: ServeConfig) -> Path | None:
    return None if config.state is None else Path(config.state)
