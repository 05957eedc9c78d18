"""The trusted worker: plays the environments that use sandboxes as tools, in a child process of the gateway.

The worker is a plain process with the rights and the environment variables of the gateway. It leases the sandboxes of
its environments from the gateway's pool, through a Unix socket in a private folder. They belong to the server itself,
and end with the worker.

The code of the environments is the operator's, so the policies for clients, such as `limits.images`, do not apply to
its sandboxes. Clients cannot choose files or images; see `refuse_operator_options`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio

from envkit import clock
from envkit.config.serving import ServeConfig
from envkit.errors import ForbiddenError, OptionError, UnknownEnvError, UsageError
from envkit.fleet import FleetHost, WorkerClient, WorkerStart
from envkit.fleet.suspects import Offenders
from envkit.http.api.app import App, create_app
from envkit.http.auth.caller import Caller
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.http.protocol.asgi import Receive, Scope, Send
from envkit.http.server.server import serve
from envkit.protocols import EnvHost, Episode, Sandbox
from envkit.registry import foreign_choices
from envkit.sandbox.host import run_dirs
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.sandbox.process.backend import ProcessBackend
from envkit.sandbox.transfer import tar_stream
from envkit.types import SandboxSpec, Task, TenantKey
from envkit.wiring import environments
from envkit.wiring.gateway.env_workers import NO_WORKER_TIMEOUT_S, connector
from envkit.wiring.judge import open_judge
from envkit.wiring.sandboxes import env_sandboxes

_PREFIX = ":tools-"
"""Prefix of the ids of the environments' sandboxes. Clients cannot use these; see `SandboxAccess.usable_key`."""
_STOP_S = 60.0
_DRAIN_S = 1.0


def trusted_envs(config: ServeConfig) -> tuple[frozenset[str], frozenset[str]]:
    """Return the ids of the environments that need sandboxes or a judge: those that `config` allows, and the others.

    Raises:
        UsageError: `envs.trusted` names an environment that is not registered or needs no sandbox.
    """
    found = frozenset(spec.id for spec in environments.registered() if spec.needs)
    wanted = found if config.envs.trusted is None else frozenset(config.envs.trusted)
    if unknown := sorted(wanted - found):
        raise UsageError(f"envs.trusted: no registered environment {unknown[0]} needs sandboxes; leave it out")
    return wanted, found - wanted


@dataclass(frozen=True, slots=True)
class RoutedHosts(EnvHost):
    """Plays each environment in the trusted worker or in sandboxes.

    `allowed` and `refused` are what `trusted_envs` returns. Without allowed ones, there is no trusted worker.
    """

    fleet: EnvHost
    trusted: EnvHost | None
    allowed: frozenset[str]
    refused: frozenset[str]

    @property
    def capacity(self) -> int:
        return self.fleet.capacity + (0 if self.trusted is None else self.trusted.capacity)

    @property
    def why_unready(self) -> str:
        return self.fleet.why_unready

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        return self._host_of(task.env_id).lease(task)

    def lease_as(self, key: TenantKey, task: Task) -> AbstractAsyncContextManager[Episode]:
        return self._host_of(task.env_id).lease_as(key, task)

    def partition_of(self, env_id: str, tenant: str) -> tuple[str, int]:
        name, slots = self._host_of(env_id).partition_of(env_id, tenant)
        return ("environments with tools" if env_id in self.allowed else name), slots

    def resumable_task(self, key: TenantKey) -> Task | None:
        return self.fleet.resumable_task(key)

    def resumable_keys(self) -> Sequence[TenantKey]:
        return self.fleet.resumable_keys()

    def _host_of(self, env_id: str) -> EnvHost:
        if env_id in self.refused:
            raise ForbiddenError(f"{env_id} may not use the sandboxes of this server; add it to envs.trusted there")
        return self.trusted if self.trusted is not None and env_id in self.allowed else self.fleet


def refuse_operator_options(task: Task) -> None:
    """Reject a task of a client that has options which only the operator sets.

    See `envkit.registry.EnvSpec.operator_options`. Environments open such files with the rights of the server or of a
    sandbox that tenants share, and the policy for clients does not apply to the images of their sandboxes.

    Raises:
        OptionError: The task has an option of the operator with which its environment is not registered.
    """
    try:
        names = foreign_choices(environments.find(task.env_id), task.options)
    except UnknownEnvError:  # only the image of the sandboxes may have it
        return
    for name in names:
        remedy = "register an environment with this option there"
        raise OptionError(name, f"only the operator of the server may set it; {remedy}, or leave it out")


@asynccontextmanager
async def trusted_host(config: ServeConfig, pool: Pool) -> AsyncIterator[FleetHost]:
    """Open the host of the trusted worker, which starts with its first episode and leases sandboxes from `pool`.

    Raises:
        UsageError: `envs.judge` is invalid.
    """
    if config.envs.judge is not None:
        try:
            async with open_judge(config.envs.judge):
                pass
        except UsageError as error:
            raise UsageError(f"envs.judge: {error}") from None
    capacity = config.envs.tool_episodes
    async with AsyncExitStack() as parts:
        backend = await parts.enter_async_context(ProcessBackend())
        workers = await parts.enter_async_context(
            Pool(
                [Node("trusted", backend)],
                liveness_times=env_sandboxes.liveness_times(config.liveness),
                restarts=config.restarts.limit(),
            )
        )

        async def start(name: str, slots: int) -> WorkerStart:
            prefix = f"{_PREFIX}{name}-"
            address = await parts.enter_async_context(_serve_pool(pool, prefix))
            return WorkerStart(_worker_spec(slots, address, config.envs.judge), partial(_connect, config, pool, prefix))

        host = FleetHost(
            workers,
            await start("trusted", capacity),
            extra_start=await start("extra", 1),  # so that its end stops no sandboxes of the other worker
            workers=1,
            slots_per_sandbox=capacity,
            on_demand=True,
            longest_step_s=config.limits.step_timeout_s,
            wait_timeout_s=NO_WORKER_TIMEOUT_S,
            replayable=environments.is_replayable,
            offenders=Offenders(config.restarts.limit()),
        )
        yield await parts.enter_async_context(host)


def _worker_spec(slots: int, address: str, judge: str | None) -> SandboxSpec:
    spec = env_sandboxes.env_sandbox_spec(slots, in_image=False)
    given = {name: value for name, value in os.environ.items() if name != "ENVKIT_SOCKETS"}
    options = ("--sandboxes", address, *(() if judge is None else ("--judge", judge)))
    paths = {"PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path)}
    return replace(spec, command=(*spec.command, *options), env={**given, **spec.env, **paths})


@asynccontextmanager
async def _connect(config: ServeConfig, pool: Pool, prefix: str, sandbox: Sandbox) -> AsyncIterator[WorkerClient]:
    """Open a client of a worker. When the worker ends, stop the sandboxes of its environments."""
    async with connector(config)(sandbox) as client:
        try:
            yield client
        finally:
            with anyio.move_on_after(_STOP_S, shield=True):
                async with anyio.create_task_group() as tasks:
                    for view in pool.views(tenant=""):
                        if view.id.startswith(prefix):
                            tasks.start_soon(pool.stop, view.id)


@asynccontextmanager
async def _serve_pool(pool: Pool, prefix: str) -> AsyncIterator[str]:
    """Serve the sandboxes of the pool on a Unix socket in a private folder; yield the address.

    The ids of the sandboxes get `prefix`, which makes them sandboxes of the server itself, not of a tenant.
    """
    policy = SandboxPolicy(may_mount=True)
    app = create_app(NoEnvironments(), lazy=True, pool=pool, folder_transport=tar_stream, policy=policy)
    is_ready = anyio.Event()
    folder = run_dirs.new_run_folder()
    try:
        async with clock.background_tasks() as tasks:
            served = _PoolApp(app, Caller(own_prefix=prefix))
            path = str(folder / "pool.sock")

            def on_ready(address: str) -> None:
                is_ready.set()

            tasks.start_soon(
                partial(serve, served, uds=path, on_ready=on_ready, handle_signals=False, drain_s=_DRAIN_S)
            )
            await is_ready.wait()
            yield f"unix:{path}"
    finally:
        run_dirs.remove(folder)


@dataclass(frozen=True, slots=True)
class _PoolApp:
    """Serves `app` to one caller, without tokens."""

    app: App
    caller: Caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            scope = {**scope, "state": {"caller": self.caller}}
        await self.app(scope, receive, send)

    async def drain(self, timeout_s: float) -> None:
        await self.app.drain(timeout_s)


class NoEnvironments(EnvHost):
    """A host without episodes."""

    capacity = 0

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        raise UnknownEnvError(task.env_id, ())
