"""The gateway: a pool of sandboxes, the environments that are played in some of them, and the server before both."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import re
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from envkit import clock
from envkit.config.serving import ServeConfig, StockSection
from envkit.errors import CapacityError, EnvkitError, SandboxStartError, UsageError
from envkit.fleet import FleetHost, Home, Homes, Probing
from envkit.fleet.alerts import send_alerts, watch_disks
from envkit.fleet.autoscale import autoscale, run_command
from envkit.fleet.ledger import Ledger
from envkit.http.access_log import AccessLog
from envkit.http.app import create_app
from envkit.http.guard import Guard
from envkit.http.permits import Permits
from envkit.http.rates import Rate
from envkit.http.server import require_address, serve
from envkit.http.snapshots import SnapshotBounds
from envkit.http.tokens import TokenStore
from envkit.protocols import EnvHost, Sandbox
from envkit.restarts import RestartBudget
from envkit.sandbox import trees
from envkit.sandbox.docker import DEFAULT_IMAGE, DockerBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import Watch
from envkit.sandbox.pool.nodes import Demand, Holds, Node
from envkit.sandbox.pool.stocks import Stock
from envkit.sandbox.process import ProcessBackend
from envkit.sandbox.ray.nodes import RayNodes
from envkit.types import SandboxSpec, SandboxState, SandboxView
from envkit.wiring import envs, fleet_metrics, machine, sandboxes
from envkit.wiring.tokens import open_tokens, state_folder

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_HERE = "here"
_ENV_BOX = ":envs-"
"""How the boxes that serve environments are called; the names that callers give have no colon."""
_LACKING = ("No module named 'envkit", "no Python", "neither Python")
"""What a box says whose image cannot serve environments."""
_DARK_S = 45.0
"""Seconds that episodes wait while no box is there: less than the 60 s that a client waits for an answer."""
_BOOT_CALL_S = 5.0
_BOOT_RETRY_S = 0.02


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
        announce("tokens: every caller needs one (envkit token create)")
    rate = None if limits.calls_per_s is None else Rate(limits.calls_per_s, burst=max(limits.calls_per_s, 1.0))
    end = _End()
    end.on_signals()
    with tokens, _access_log(config) or nullcontext() as log, end.by_signals():
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
                    Guard(app, tokens, rate=rate, log=log, errors=app.errors),
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
        async with envs.slots(config.envs.capacity) as slots:
            yield Fleet(slots)
        return
    async with AsyncExitStack() as stack:
        places = await stack.enter_async_context(_places(config))
        count, own_count = _env_counts(config, places)
        shared_box = _env_box(config, places, math.ceil(config.envs.capacity / count))
        pool = Pool(
            places.nodes,
            stocks=[Stock(shared_box, config.envs.spares, _booted), *map(_stock, config.spares)],
            most=config.limits.sandboxes_per_tenant,
            share=config.limits.tenant_share,
            watch=Watch(**config.silence.model_dump()),
            restarts=RestartBudget(config.restarts.budget, config.restarts.window_s),
            ledger=places.ledger,
        )
        scale = None
        if config.backend == "ray":
            ray = RayNodes(pool.add_node, pool.remove_node, address=config.ray.address, kind=config.ray.kind)
            scale = (await stack.enter_async_context(ray)).request
        await stack.enter_async_context(pool)
        try:
            shared = await stack.enter_async_context(_host(config, pool, places, shared_box, "shared", boxes=count))
        except SandboxStartError as error:
            if places.in_image and any(words in error.cause for words in _LACKING):
                raise UsageError(_image_lacks(shared_box.image or DEFAULT_IMAGE, error.cause)) from None
            raise
        announce(f"sandboxes: {places.what}; environments in {count} {'box' if count == 1 else 'boxes'}")
        for node in places.nodes:
            share = f"{config.limits.tenant_share:.0%}".removesuffix("%")
            announce(f"room: {machine.described(node.holds)}; of each a tenant may have {share} % (node, limits)")
        if not own_count:
            await _forget_seats(places.ledger, pool, shared)
            yield Fleet(shared, pool, places.disks, (shared,), scale, places.isolates)
            return
        alone = _alone()
        own_box = _env_box(config, places, 1)
        own = await stack.enter_async_context(_host(config, pool, places, own_box, "own", boxes=own_count))
        await _forget_seats(places.ledger, pool, shared, own)
        homes = Homes(shared, own, lambda env_id: env_id not in alone)
        yield Fleet(homes, pool, places.disks, (shared, own), scale, places.isolates)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where boxes are started: the nodes that there are at first, what to call them, whether environments need an image
    there, whether what runs there is kept away from this process, where leases are written down, and how full the disks
    are.
    """

    nodes: Sequence[Node]
    what: str
    in_image: bool
    isolates: bool
    ledger: Ledger | None
    disks: Callable[[], Mapping[str, tuple[int, int]]] | None = None


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
        found = await clock.to_thread(machine.this_machine)
        if isinstance(backend, DockerBackend):  # its daemon may be elsewhere
            await _require_image(backend, config.envs.image or DEFAULT_IMAGE)
            found = replace(found, memory_mib=backend.machine_memory_mib)
        node = Node(_HERE, backend, machine.filled_in(Holds(**config.node.model_dump()), found))
        isolates = backend.capabilities()["isolation"]
        what += why
        in_image = isinstance(backend, DockerBackend)
        yield _Places((node,), what, in_image, isolates=isolates, ledger=ledger, disks=backend.disks)


async def _require_image(backend: DockerBackend, image: str) -> None:
    """Raises:
    UsageError: There is no such image; says how to make it.
    """
    if not await backend.has_image(image):
        tag = "" if image == DEFAULT_IMAGE else f" --tag {image}, or fetch it: docker pull {image}"
        raise UsageError(
            f"there is no image {image} here, in whose boxes environments are served; make it: "
            f"envkit image build games{tag}"
        )


def _image_lacks(image: str, cause: str) -> str:
    made = "" if image == DEFAULT_IMAGE else f" --base {image} --tag {image}{'' if ':' in image else ':1'}-envkit"
    return (
        f"environments are served in boxes of image {image}, which lacks envkit or Python ({cause}); make one that has "
        f"them: envkit image build games{made}{', and name it in envs.image' if made else ''}"
    )


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


def _alone() -> set[str]:
    """Return the environments whose episodes have a box of their own each."""
    return {spec.id for spec in envs.registered() if not spec.shares}


def _env_counts(config: ServeConfig, places: _Places) -> tuple[int, int]:
    """Return how many boxes serve environments that share them, and how many those that do not.

    Raises:
        UsageError: They cannot all be held.
    """
    processors = len(os.sched_getaffinity(0))
    own = config.envs.own_boxes if _alone() else 0
    if not places.nodes:
        return config.envs.boxes or processors, own
    (node,) = places.nodes
    takes = Demand.of(_env_box(config, places, 1))
    count = config.envs.boxes or machine.env_boxes(node, takes, processors)
    room = node.room(takes)
    if count > room:
        raise UsageError(
            f"environments are served in {count} {'box' if count == 1 else 'boxes'} of {takes.memory_mib} MiB each, and"
            f" this machine holds together {machine.described(node.holds)}: lower envs.boxes or envs.memory_mib, or set"
            " node.memory_mib"
        )
    return count, max(int(min(own, room - count)), min(own, 1))


class EnvBoxes:
    """Takes the boxes that serve environments out of a pool, first those that an earlier server left running."""

    def __init__(self, pool: Pool, spec: SandboxSpec, kind: str, most: int) -> None:
        self._pool = pool
        self._spec = spec
        self._kind = f"{_ENV_BOX}{kind}-"
        self._most = most
        self._left: list[str] | None = None
        self._was_full = False

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
        try:
            # At first nobody waits, so that a server starts that has less room than it was told; then in turn.
            await self._pool.create(name, self._spec, wait_s=math.inf if self._was_full else None)
        except CapacityError:
            self._was_full = True
            raise
        return self._pool.get(name)


def _host(config: ServeConfig, pool: Pool, places: _Places, box: SandboxSpec, kind: str, *, boxes: int) -> FleetHost:
    """Return the host that plays in boxes of one kind; in ``"own"`` ones a single episode each."""
    silence, longest_s = config.silence, config.limits.step_timeout_s
    return FleetHost(
        EnvBoxes(pool, box, kind, boxes).start,
        partial(sandboxes.connect, longest_s),
        boxes=boxes,
        slots_per_box=1 if kind == "own" else math.ceil(config.envs.capacity / boxes),
        episodes_per_box=1 if kind == "own" else None,
        restarts=RestartBudget(config.restarts.budget, config.restarts.window_s),
        alert=partial(pool.alert, "restarts"),
        probing=Probing(silence.interval_s, silence.lost_s - silence.interval_s, misses=1, longest_step_s=longest_s),
        wait_timeout_s=_DARK_S,
        seats=places.ledger,
        replayable={spec.id for spec in envs.registered() if spec.replayable}.__contains__,
    )


async def _forget_seats(ledger: Ledger | None, pool: Pool, *hosts: FleetHost) -> None:
    """Forget the episodes whose boxes did not outlive the server before us."""
    if ledger is None:
        return
    alive = {key for host in hosts for key in host.recallable()}
    try:
        await ledger.forget([key for key in ledger.seated() if key not in alive])
    except EnvkitError as error:
        pool.alert("ledger", str(error))


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


def _metrics(fleet: Fleet, log: AccessLog | None) -> Iterator[Metric]:
    if fleet.pool is not None:
        yield from fleet_metrics.collect(fleet.pool, fleet.hosts)
    if log is not None:
        yield from fleet_metrics.of_log(log.dropped)


def _tokens(config: ServeConfig) -> TokenStore:
    """Return whom to let in: everybody until there is a token, which is for callers on this machine alone.

    Raises:
        UsageError: Others could come, and there are no tokens.
    """
    store = open_tokens(_state(config))
    if not store.is_needed() and config.listen.socket is None and not _is_loopback(config.listen.host):
        store.close()
        raise UsageError(
            f"{config.listen.host} can be reached by others, and there are no tokens: make one with "
            "'envkit token create', or listen on 127.0.0.1"
        )
    return store


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
