"""Opens hosts that play episodes for training and evaluation, in sandboxes with an env server or in this process."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import anyio

from envkit.config import LivenessSection
from envkit.config.parts import BuiltInSandboxSection, SandboxSection
from envkit.errors import UnknownEnvError, UnreachableError
from envkit.fleet import FleetHost, WorkerClient, WorkerStart
from envkit.http.client.chat import Address
from envkit.http.client.env_client import EnvClient
from envkit.protocols import EnvHost, Episode, Sandbox, SandboxBackend
from envkit.registry import ENTRY_POINT_GROUP
from envkit.sandbox.bubblewrap import host_python
from envkit.sandbox.docker.backend import GAMES_IMAGE
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import LivenessTimes
from envkit.sandbox.pool.node import Node
from envkit.types import SandboxSpec, Task
from envkit.wiring import data, environments
from envkit.wiring.contexts import SandboxContext, open_part
from envkit.wiring.environments import Resources
from envkit.wiring.judge import open_judge
from envkit.wiring.sandboxes.backends import choose, open_tool_pool
from envkit.wiring.sandboxes.run_nodes import RunNodes

_SOCKET = "env.sock"
_HEARTBEAT = "env.heartbeat"
_SERVE = f'exec "$0" -m envkit.wiring.env_server --socket "$ENVKIT_SOCKETS/{_SOCKET}" --capacity "$@"'
_HINT = (
    "it is registered only in this process, not in the sandbox; register it through the entry point group "
    f"{ENTRY_POINT_GROUP!r} of a package that is installed by pip, not by PYTHONPATH; for docker, build an image with "
    "the package: envkit image build games --with ./PACKAGE (with --tag NAME:1, name it in envs.image); or play "
    "without sandboxes (sandbox.kind: none)"
)


@asynccontextmanager
async def sandbox_host(
    section: SandboxSection,
    *,
    slots_per_sandbox: int,
    call_timeout_s: float = 60.0,
    slow_timeout_s: float | None = None,
    announce: Callable[[str], None] = lambda line: None,
    tools: ToolSettings | None = None,
    nodes: RunNodes | None = None,
) -> AsyncIterator[EnvHost]:
    """Open a host for episodes. Environments that use sandboxes as tools run in this process, others in sandboxes.

    Args:
        section: Kind and number of the sandboxes; see `BuiltInSandboxSection`.
        slots_per_sandbox: Number of concurrent episodes in each sandbox.
        call_timeout_s: Seconds after which a step without a reply raises a `DeadlineError`.
        slow_timeout_s: The same for resets and graders; None means `call_timeout_s`.
        announce: Called with one line: the chosen kind and, if it is a fallback, the reason.
        tools: The environments that need something from this process; None if no environment does.
        nodes: The nodes on which the sandboxes run; None: on this machine.

    Raises:
        UsageError: This kind does not work on this machine; the message names the remedy.
        SandboxStartError: No sandbox started; the message gives the reason.
    """
    async with AsyncExitStack() as parts:
        with_tools: EnvHost | None = None
        if tools is not None and tools.env_ids:
            with_tools = await parts.enter_async_context(_tool_host(section, tools, announce, nodes))
            if tools.only:
                yield with_tools
                return
        if section.kind == "none":
            announce(f"sandbox: none, {section.count * slots_per_sandbox} episodes at once in this process")
            host: EnvHost = await parts.enter_async_context(environments.slots(section.count * slots_per_sandbox))
        else:
            if nodes is None:
                context = SandboxContext(section=section, announce=announce)
                backend: SandboxBackend = await open_part(parts, "sandboxes", section.kind, context)
                here, in_image = [Node("here", backend)], getattr(backend, "in_image", False)
                sees_data = backend.capabilities()["isolation"]
            else:
                here, in_image, sees_data = [], nodes.in_image, False
            pool = Pool(here, liveness_times=liveness_times(section.liveness), restarts=section.restarts.limit())
            if nodes is not None:
                await parts.enter_async_context(nodes.used_by(pool))
            spec = env_sandbox_spec(slots_per_sandbox, in_image=in_image, sees_data=sees_data)
            fleet = FleetHost(
                await parts.enter_async_context(pool),
                WorkerStart(spec, partial(connect, call_timeout_s, slow_timeout_s=slow_timeout_s)),
                workers=section.count,
                slots_per_sandbox=slots_per_sandbox,
                ends_when_spent=True,
                longest_step_s=call_timeout_s,
                replayable=environments.is_replayable,
            )
            host = await parts.enter_async_context(fleet)
        yield host if tools is None or with_tools is None else _ByEnv(tools.env_ids, with_tools, host)


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """The environments that need something from this process; see `envkit.registry.EnvSpec.needs`.

    Attributes:
        env_ids: Ids of these environments.
        needs: What they need.
        only: Whether there are no other environments.
        episodes: Maximum number of concurrent episodes, including those that are being graded.
        judge: Address of the judge; see `envkit.wiring.judge.open_judge`.
        views: Read-only mounts of the sandboxes.
    """

    env_ids: frozenset[str]
    needs: frozenset[str]
    only: bool
    episodes: int
    judge: str | Address | None = None
    views: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class _ByEnv(EnvHost):
    """Plays some environments on one host, and all others on another."""

    env_ids: frozenset[str]
    with_tools: EnvHost
    others: EnvHost

    @property
    def capacity(self) -> int:
        return self.others.capacity

    @property
    def queued(self) -> int:
        return self.with_tools.queued

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        return (self.with_tools if task.env_id in self.env_ids else self.others).lease(task)


@asynccontextmanager
async def _tool_host(
    section: SandboxSection, tools: ToolSettings, announce: Callable[[str], None], nodes: RunNodes | None
) -> AsyncIterator[EnvHost]:
    """Open a host in this process for environments that get a pool of sandboxes or a judge."""
    async with AsyncExitStack() as parts:
        pool: Pool | None = None
        if "sandbox" in tools.needs and section.kind != "none":
            opening: AbstractAsyncContextManager[Pool]
            times = liveness_times(section.liveness)
            if nodes is not None:
                opening = other = Pool([], liveness_times=times, views=tools.views)
                await parts.enter_async_context(nodes.used_by(other))
            elif isinstance(section, BuiltInSandboxSection):
                opening = open_tool_pool(section.kind, times=times, announce=announce, views=tools.views)
            else:
                context = SandboxContext(section=section, announce=announce)
                backend: SandboxBackend = await open_part(parts, "sandboxes", section.kind, context)
                opening = Pool([Node("here", backend)], liveness_times=times, views=tools.views)
            pool = await parts.enter_async_context(opening)
        judge = None
        if tools.judge is not None:
            judge = await parts.enter_async_context(open_judge(tools.judge))

        def queued() -> int:
            return 0 if pool is None else sum(pool.counts().waiting.values())

        resources = Resources(pool, judge)
        yield await parts.enter_async_context(environments.slots(tools.episodes, None, resources, queued=queued))


def liveness_times(section: LivenessSection) -> LivenessTimes:
    """Return when a sandbox is probed, suspected and lost."""
    interval_s = section.lost_s / 4
    return LivenessTimes(interval_s, 1.5 * interval_s, section.lost_s)


@asynccontextmanager
async def open_backend(context: SandboxContext) -> AsyncIterator[SandboxBackend]:
    """Open a built-in backend for a training run, and announce it.

    Raises:
        UsageError: This kind does not work on this machine; the message names the remedy.
    """
    section = context.section
    assert isinstance(section, BuiltInSandboxSection)
    assert section.kind != "none", "these episodes run in this process"
    chosen = await choose(section.kind, image=GAMES_IMAGE, may_be_process=True)
    count = f"{section.count} {'sandbox' if section.count == 1 else 'sandboxes'}"
    context.announce(f"sandbox: {chosen.name}, {count}{chosen.reason}")
    async with chosen.backend as backend:
        yield backend


def env_sandbox_spec(
    capacity: int, *, in_image: bool, image: str | None = None, sees_data: bool = False
) -> SandboxSpec:
    """Return the spec of a sandbox with an env server.

    Args:
        capacity: Number of concurrent episodes in the sandbox.
        in_image: Whether the sandbox runs in an image that contains envkit, as with Docker. Otherwise the sandbox uses
            the Python and import path of this process.
        image: The image; None means `GAMES_IMAGE` if it runs in one.
        sees_data: Whether the sandbox can see folders of this machine, and gets the data of environments.
    """
    # Limit NumPy to one thread: environments compute little, and many thread pools would compete for the cores.
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    views = tuple(data.views()) if sees_data else ()
    if sees_data:  # also without views, so that a sandbox does not build data for itself
        env[data.FOLDER_VARIABLE] = data.INSIDE
    if in_image:
        serve = ("/bin/sh", "-c", _SERVE, "python3", str(capacity))
        return SandboxSpec(serve, env=env, image=image or GAMES_IMAGE, views=views)
    env["PYTHONPATH"] = ":".join(host_python.import_path())
    if sys.dont_write_bytecode:
        env["PYTHONDONTWRITEBYTECODE"] = "1"
    return SandboxSpec(("/bin/sh", "-c", _SERVE, sys.executable, str(capacity)), env=env, image=image, views=views)


@asynccontextmanager
async def connect(
    call_timeout_s: float, sandbox: Sandbox, *, slow_timeout_s: float | None = None
) -> AsyncIterator[WorkerClient]:
    """Open a client of the env server in a sandbox; `sandbox_host` describes the timeouts."""
    slow_s = call_timeout_s if slow_timeout_s is None else slow_timeout_s
    async with EnvClient(
        connect=partial(sandbox.connect, _SOCKET),
        name=f"sandbox {sandbox.id}",
        timeout_s=call_timeout_s,
        reset_timeout_s=slow_s,
        grade_timeout_s=slow_s,
    ) as client:
        yield _SandboxedEnvClient(client, sandbox)


@dataclass(frozen=True, slots=True)
class _SandboxedEnvClient:
    """Client of an env server. If only this process knows an environment, the error says how to add it to sandboxes."""

    client: EnvClient
    sandbox: Sandbox

    async def health(self) -> object:
        return await self.client.health()

    async def heartbeat(self) -> None:
        with await self.sandbox.connect(_HEARTBEAT) as stream:
            await anyio.wait_readable(stream)
            if not stream.recv(1):
                raise UnreachableError(f"the env server of sandbox {self.sandbox.id} does not answer")

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Episode]:
        try:
            async with self.client.lease(task, id=id) as episode:
                yield episode
        except UnknownEnvError as error:
            if all(spec.id != error.env_id for spec in environments.registered()):
                raise
            raise UnknownEnvError(error.env_id, error.known, _HINT) from None
