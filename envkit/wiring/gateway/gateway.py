"""The gateway: a pool of sandboxes, environments that run in some of them, and the server in front of both."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    closing,
    nullcontext,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from envkit import clock
from envkit.config.serving import ServeConfig
from envkit.errors import SandboxStartError, UsageError
from envkit.fleet import FleetHost
from envkit.fleet.alerts import log_events, send_alerts, watch_disks
from envkit.http.api.app import App, create_app
from envkit.http.auth.localhost_only import is_loopback
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.http.auth.tokens import TokenStore
from envkit.http.server.logs import BackgroundHandler, access_log
from envkit.http.server.middleware import AuthMiddleware
from envkit.http.server.server import DRAIN_S, require_address, serve
from envkit.http.sessions.metrics import by_label
from envkit.installation import command
from envkit.protocols import EnvHost
from envkit.sandbox import machine
from envkit.sandbox.docker.backend import GAMES_IMAGE
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.sandbox.transfer import tar_stream
from envkit.types import CauseKind, SandboxSpec, SandboxState
from envkit.wiring import environments
from envkit.wiring.gateway.env_workers import (
    env_host,
    env_sandbox_spec,
    forget_lost_sessions,
    sandbox_count,
    wait_until_serving,
)
from envkit.wiring.gateway.model import open_model
from envkit.wiring.gateway.nodes import image_lacks, keeps_ledger, ledger_of, open_machine, state_file
from envkit.wiring.gateway.remote_nodes import RemoteNodes, read_address
from envkit.wiring.gateway.token_store import JOINED, lock_state, open_tokens
from envkit.wiring.gateway.trusted import (
    NoEnvironments,
    RoutedHosts,
    refuse_operator_options,
    trusted_envs,
    trusted_host,
)
from envkit.wiring.sandboxes.env_sandboxes import liveness_times

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.2
_JOIN_DRAIN_S = 1.0
_ALERTS = ("disk", "ledger", "memory", "probe", "restarts", "stock", "stop")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The host and the pool that a gateway serves; without sandboxes, only the host.

    Attributes:
        hosts: The hosts that `host` routes episodes to.
        isolates: Whether sandboxes are isolated from this process.
        keeps_sandboxes: Whether sandboxes outlive this process, for the next server with the same ledger.
        remote: The nodes on other machines.
    """

    host: EnvHost
    pool: Pool | None = None
    hosts: tuple[FleetHost, ...] = ()
    isolates: bool = True
    keeps_sandboxes: bool = False
    remote: RemoteNodes | None = None


async def serve_fleet(
    config: ServeConfig, *, announce: Callable[[str], None], on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve a fleet until SIGTERM, SIGINT or cancellation, then finish running calls and stop every sandbox.

    The first signal starts the shutdown, even while the server is starting. Later signals are ignored, because a
    server that is killed during shutdown leaves sandboxes behind. With `drain_s`, the first signal starts the wait for
    running episodes, and the second ends it; then this process ends at once, as if killed, and leaves its sandboxes
    and sessions to the next server, provided that the ledger records them.

    `announce` is called with each line to print while the server starts, and `on_ready` once with the server's address,
    as soon as the server accepts requests.

    Raises:
        UsageError: The address, the state folder or the backend cannot be used; the message says what to do.
        SandboxError: No sandbox started; the message says why.
    """
    listen, limits = config.listen, config.limits
    require_address(**listen.address)
    tokens = _tokens(config)
    if tokens.is_needed():
        announce(f"tokens: every caller needs one; create it: {_create_token(config)}")
    on_signals: list[Callable[[], None]] = []
    _handle_signals(on_signals)
    with _state(config), _access_log(config) as log, anyio.CancelScope() as starting:
        on_signals.append(partial(_shut_down, starting))
        async with (
            open_fleet(config, announce) as fleet,
            open_model(config, announce) as model,
            clock.background_tasks() as tasks,
        ):
            app = create_app(
                fleet.host,
                envs=environments.registered,
                check_task=refuse_operator_options,
                ttl_s=limits.session_ttl_s,
                step_timeout_s=limits.step_timeout_s,
                reset_timeout_s=limits.reset_timeout_s,
                grade_timeout_s=limits.grade_timeout_s,
                tenant_share=limits.tenant_share,
                max_request_bytes=limits.request_bytes,
                pool=fleet.pool,
                folder_transport=tar_stream,
                sandbox_ttl_s=limits.sandbox_ttl_s,
                policy=SandboxPolicy(limits.networks, limits.profiles, limits.images, fleet.isolates),
                metrics=partial(_metrics, fleet, log),
                model=model,
                handlers=() if fleet.remote is None else (fleet.remote,),
            )
            drain = anyio.Event() if config.drain_s else None
            leaves = drain is not None and fleet.keeps_sandboxes
            with anyio.CancelScope() as stopping:
                on_signals[:] = [partial(_shut_down, stopping)]
                if drain is not None:
                    on_signals.append(drain.set)
                    tasks.start_soon(_drain, app, drain, config.drain_s, stopping, leaves)
                await serve(
                    AuthMiddleware(app, tokens, log=log, errors=app.errors),
                    **listen.address,
                    on_ready=on_ready,
                    handle_signals=False,
                    on_drained=partial(_leave, fleet.pool, log) if leaves and fleet.pool is not None else None,
                )
            on_signals.clear()
    _log.info("shutdown complete")


def _handle_signals(actions: list[Callable[[], None]]) -> None:
    """At each SIGTERM or SIGINT, remove the last of `actions` and call it. Without any, ignore the signal."""

    def received() -> None:
        if actions:
            actions.pop()()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received)


def _shut_down(scope: anyio.CancelScope) -> None:
    _log.info("shutdown begins: running requests have up to %g s", DRAIN_S)
    scope.cancel()


async def _drain(app: App, begins: anyio.Event, timeout_s: float, stopping: anyio.CancelScope, leaves: bool) -> None:
    """When the event `begins` is set, refuse new work; cancel `stopping` when nothing runs, or after `timeout_s`.

    Sandboxes of clients count as running, unless the server leaves them to the next one (`leaves`).
    """
    await begins.wait()
    app.refuse_new()
    count = partial(app.in_use, with_sandboxes=not leaves)
    _log.info("draining: no new work; waiting up to %g s for what runs (%d); a signal ends this", timeout_s, count())
    with anyio.move_on_after(timeout_s):
        while count():  # noqa: ASYNC110 - events would cost time in every step
            await anyio.sleep(_DRAIN_POLL_S)
    _log.info("shutdown begins: %d still run; running requests have up to %g s", count(), DRAIN_S)
    stopping.cancel()


def _alive(pool: Pool) -> int:
    """Return the number of sandboxes that run, without those that are starting."""
    states = pool.counts().states
    return sum(states[state] for state in (SandboxState.READY, SandboxState.LEASED, SandboxState.SUSPECT))


async def _leave(pool: Pool, log: BackgroundHandler | None) -> None:
    """End this process at once, as if it was killed, so that its sandboxes outlive it. Write ledger and logs before."""
    await pool.persist()
    _log.info("shutdown complete: %d sandboxes run on for the next server", _alive(pool))
    if log is not None:
        log.close()
    logging.shutdown()
    os._exit(0)


@asynccontextmanager
async def open_fleet(config: ServeConfig, announce: Callable[[str], None]) -> AsyncIterator[Fleet]:
    """Start the fleet of `config`, and stop it at the end of the ``with`` block.

    Raises:
        UsageError: The backend is not available, or another server uses the ledger; the message says what to do.
        SandboxError: No sandbox started; the message says why.
    """
    if config.backend == "none":
        if config.nodes:
            raise UsageError("nodes: no effect with backend: none, which has no sandboxes; set backend: nodes")
        announce(f"sandboxes: none; {config.envs.capacity} concurrent episodes in this process")
        remedy = "this server has none (backend: none); start it with another backend"
        resources = environments.Resources(sandbox_remedy=remedy, judge_remedy=remedy, builds_data=False)
        async with environments.slots(config.envs.capacity, None, resources) as slots:
            yield Fleet(slots)
        return
    allowed, refused = trusted_envs(config)
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(open_machine(config))
        if (ledger := ledger_of(config, here)) is not None:
            await stack.enter_async_context(ledger)
        remote = RemoteNodes(
            [read_address(one) for one in config.nodes],
            file=None if ledger is None else state_file(config, JOINED),
            in_image=here.in_image,
            isolates=None if here.node is None else here.isolates,
            lost_s=config.liveness.lost_s,
        )
        await stack.enter_async_context(remote)
        if config.backend == "nodes" and not remote.nodes:
            await _wait_for_node(config, remote, announce)
        count = sandbox_count(config, here, remote.processors)
        spec = env_sandbox_spec(config, here, math.ceil(config.envs.capacity / count))
        own = [] if here.node is None else [here.node]
        pool = Pool(
            own,
            stocks=[
                WarmSpec(spec, config.envs.warm, wait_until_serving),
                *(WarmSpec(SandboxSpec(**one.model_dump(exclude={"count"})), one.count) for one in config.warm),
            ],
            max_per_tenant=config.limits.sandboxes_per_tenant,
            share=config.limits.tenant_share,
            liveness_times=liveness_times(config.liveness),
            restarts=config.restarts.limit(),
            ledger=ledger,
        )
        remote.attach(pool)
        await stack.enter_async_context(pool)
        if taken := _alive(pool):
            _log.info("took over %d sandboxes of an earlier server", taken)
        try:
            fleet = await stack.enter_async_context(env_host(config, pool, here, ledger, count=count))
        except SandboxStartError as error:
            lacks_envkit = "No module named 'envkit" in error.cause.detail  # library's message: CPython
            if here.in_image and (lacks_envkit or error.cause.kind is CauseKind.IMAGE_UNUSABLE):
                raise UsageError(image_lacks(spec.image or GAMES_IMAGE, error.cause)) from None
            raise
        announce(f"sandboxes: {here.what}; environments in {count} {'sandbox' if count == 1 else 'sandboxes'}")
        nodes = [*own, *remote.nodes]
        for node in nodes:
            share = f"{config.limits.tenant_share:.0%}".removesuffix("%")
            where = "" if node is here.node else f" of node {node.name}"
            announce(
                f"capacity{where}: {machine.describe(node.capacity)}; one tenant may use {share} % of each of these"
            )
        await forget_lost_sessions(ledger, pool, fleet)
        trusted = None
        if allowed:
            trusted = await stack.enter_async_context(trusted_host(config, pool))
            names = ", ".join(sorted(allowed))
            announce(
                f"trusted worker: {config.envs.tool_episodes} concurrent episodes with sandboxes as tools ({names})"
            )
            limits = [limit for node in nodes for limit in node.backend.capabilities().items()]
            if missing := sorted(name for name, is_enforced in limits if not is_enforced):
                announce(
                    "warning: those that run untrusted programs are refused, because this machine does not enforce "
                    f"{', '.join(missing)}; envkit doctor says how it could"
                )
        host = RoutedHosts(fleet, trusted, allowed, refused)
        played_in = (fleet,) if trusted is None else (fleet, trusted)
        tasks = await stack.enter_async_context(clock.background_tasks())
        if config.alerts.webhook is not None:
            tasks.start_soon(send_alerts, pool.events(), config.alerts.webhook)
        tasks.start_soon(log_events, pool.events())
        if here.disks is not None:
            tasks.start_soon(watch_disks, here.disks, pool.alert)
        yield Fleet(host, pool, played_in, bool(remote.isolates), ledger is not None, remote)


async def _wait_for_node(config: ServeConfig, remote: RemoteNodes, announce: Callable[[str], None]) -> None:
    """Answer only nodes that join, until the first one is used: without sandboxes, no environment can be served."""
    known = "; ".join(f"{one.node}: {one.why}" for one in remote.states())
    announce(f"waiting for a node: {known or 'envkit serve --node --join URL --token-file FILE'}")
    app = create_app(NoEnvironments(), lazy=True, handlers=(remote,))
    async with clock.background_tasks() as tasks:
        tasks.start_soon(
            partial(
                serve,
                AuthMiddleware(app, _tokens(config), errors=app.errors),
                **config.listen.address,
                handle_signals=False,
                drain_s=_JOIN_DRAIN_S,
            )
        )
        await remote.found.wait()


def _metrics(fleet: Fleet, log: BackgroundHandler | None) -> Iterator[Metric]:
    if fleet.pool is not None:
        yield from _of_pool(fleet.pool, fleet.hosts)
    if log is not None:
        from prometheus_client.core import CounterMetricFamily

        yield CounterMetricFamily("envkit_access_log_dropped", "Access log lines that were dropped.", log.dropped)


def _of_pool(pool: Pool, hosts: Sequence[FleetHost]) -> Iterator[Metric]:
    """Yield the metrics of a pool and of the hosts that play in its sandboxes."""
    from prometheus_client.core import CounterMetricFamily as Counter
    from prometheus_client.core import GaugeMetricFamily as Gauge

    counts = pool.counts()
    # Prometheus computes no rate from the first value of a series, so each one begins before the first loss or alert.
    losses = {kind: counts.losses.get(kind, 0) for kind in CauseKind}
    alerts = {**dict.fromkeys(_ALERTS, 0), **counts.alerts}
    slowest = max(counts.probe_s.values(), default=0.0)
    counted = [(host.lost, host.failed_starts, host.episodes.rebuilt, host.episodes.void) for host in hosts]
    lost, failed, rebuilt, void = (sum(each) for each in zip(*counted, strict=True))
    waits = sum(host.waiting for host in hosts)
    yield by_label(Gauge("envkit_sandboxes", "Existing sandboxes, by state.", labels=["state"]), counts.states)
    queued = Gauge("envkit_sandboxes_waiting", "Queued sandbox requests, by tenant.", labels=["tenant"])
    yield by_label(queued, counts.waiting)
    yield Gauge("envkit_sandboxes_warm", "Warm sandboxes: ready and not leased.", counts.warm)
    yield Gauge("envkit_sandboxes_wanted", "Sandboxes to add; below 0: to remove.", pool.wanted())
    yield Gauge("envkit_probe_seconds_max", "Slowest of the latest probes, one per sandbox.", slowest)
    yield Counter("envkit_sandbox_starts", "Sandbox starts.", counts.starts)
    yield Counter("envkit_sandbox_failed_starts", "Failed starts, except for invalid requests.", counts.failed_starts)
    yield Counter("envkit_warm_sandboxes_replaced", "Warm sandboxes that were replaced.", counts.restarts)
    yield Counter("envkit_sandboxes_finished", "Sandboxes whose command exited.", counts.finished)
    yield by_label(Counter("envkit_sandboxes_lost", "Lost sandboxes, by cause.", labels=["cause"]), losses)
    yield by_label(Counter("envkit_alerts", "Alerts, by kind.", labels=["kind"]), alerts)
    yield Counter("envkit_env_sandboxes_lost", "Lost sandboxes that served environments.", lost)
    yield Counter("envkit_env_sandbox_failed_starts", "Sandboxes lost before they served environments.", failed)
    yield Counter("envkit_episodes_rebuilt", "Episodes rebuilt in another sandbox.", rebuilt)
    yield Counter("envkit_episodes_void", "Episodes lost with their sandbox.", void)
    yield Gauge("envkit_env_sandboxes_waiting", "Environment sandboxes waiting for a restart.", waits)


def _tokens(config: ServeConfig) -> TokenStore:
    """Open the token store. Without tokens, the server accepts every caller, so it must listen on this machine only."""
    store = open_tokens(config.state)
    if not store.is_needed() and config.listen.socket is None and not is_loopback(config.listen.host):
        raise UsageError(
            f"{config.listen.host} is reachable from other machines, and there are no tokens; create one with "
            f"'{_create_token(config)}', or listen on 127.0.0.1"
        )
    return store


def _create_token(config: ServeConfig) -> str:
    """Return the command that creates a token for this server."""
    state = () if config.state is None else ("--state", str(config.state))
    return command("token", "create", "--tenant", "NAME", *state)


def _state(config: ServeConfig) -> AbstractContextManager[object]:
    """Lock the state folder if `config` names one, or if this server writes its ledger there."""
    return lock_state(config.state) if config.state is not None or keeps_ledger(config) else nullcontext()


def _access_log(config: ServeConfig) -> AbstractContextManager[BackgroundHandler | None]:
    """Open the access log; None if it is off."""
    if config.access_log is None:
        return nullcontext()
    path = None if config.access_log == "-" else Path(config.access_log)
    try:
        return closing(access_log(path))
    except OSError as error:
        raise UsageError(f"access_log: {path} cannot be written: {error.strerror or error}") from None
