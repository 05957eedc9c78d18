"""Creates environments by name (`make`, `make_vec`), and hosts that play them in this process."""

from __future__ import annotations

import inspect
import json
import logging
import shlex
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from envkit import registry
from envkit.env import AsyncEnv, attributed
from envkit.errors import ConfigError, EnvkitError, OptionError, UnknownEnvError, UsageError, did_you_mean
from envkit.http.client.outages import OUTAGE_TIMEOUT_S, Outages
from envkit.local_host import AnyEnv, SlotHost, close_env
from envkit.protocols import EnvHost, Expert, Judge, SandboxPool
from envkit.registry import EnvSpec
from envkit.types import JSON, Options
from envkit.wiring import data
from envkit.wiring.blocking_env import BlockingEnv, loop_thread
from envkit.wiring.catalogue import NAMESPACE, load_catalogue

VectorMode = Literal["native", "sync", "async"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resources:
    """Sandboxes and a judge for the environments that need them; see `envkit.registry.EnvSpec.needs`.

    Attributes:
        sandboxes: Leases sandboxes; None if there are no sandboxes.
        judge: A language model that grades answers; None if there is no judge.
        sandbox_remedy: What to do if an environment needs sandboxes that this process does not have.
        judge_remedy: What to do if an environment needs a judge that this process does not have.
        builds_data: Whether missing data of an environment is built when it is first used; otherwise it is an error.
    """

    sandboxes: SandboxPool | None = None
    judge: Judge | None = None
    sandbox_remedy: str = "set sandbox.kind to auto, local or docker in the training file"
    judge_remedy: str = "set --judge MODEL@URL, env.judge in the training file, or judge= of envkit.make"
    builds_data: bool = True

    @classmethod
    def unused(cls) -> Resources:
        """Return resources for environments that are only created, to check their options, and never reset."""
        return cls(cast("SandboxPool", object()), cast("Judge", object()))

    def arguments(self, spec: EnvSpec) -> Mapping[str, object]:
        """Return the arguments of an entry point for what it needs. Raises `UsageError` if this process lacks it."""
        found: dict[str, object] = {}
        for need, argument, value, noun, remedy in (
            ("sandbox", "sandboxes", self.sandboxes, "sandboxes", self.sandbox_remedy),
            ("judge", "judge", self.judge, "a judge model", self.judge_remedy),
        ):
            if need in spec.needs:
                if value is None:
                    raise UsageError(f"{spec.id} needs {noun}, which this process does not have; {remedy}")
                found[argument] = value
        return found


NO_RESOURCES = Resources()

_SLOT_WAIT_S = 60.0
"""Seconds that a blocking environment waits for a slot of a full server."""


def registered() -> Sequence[EnvSpec]:
    """Return the specs of all registered environments."""
    load_catalogue()
    return list(registry.specs())


def is_replayable(env_id: str) -> bool:
    """Return whether an environment's state depends only on the task and the actions. False if `env_id` is unknown."""
    try:
        return find(env_id).replayable
    except UnknownEnvError:
        return False


def find(env_id: str) -> EnvSpec:
    """Return the spec of `env_id`; see `envkit.registry.find`."""
    if not registry.is_registered(env_id):  # a server asks at each start of an episode
        load_catalogue()
    return registry.find(env_id)


def make(
    env_id: str,
    *,
    url: str | None = None,
    token: str | None = None,
    ca: Path | str | None = None,
    outage_timeout_s: float = OUTAGE_TIMEOUT_S,
    backend: str | None = None,
    judge: Judge | str | None = None,
    **options: Any,
) -> gymnasium.Env[Any, Any]:
    """Create an environment. Observations and actions are text, unless the options select another form.

    Args:
        env_id: Registered id, such as ``"Sokoban-v0"``.
        url: Address of an `envkit serve` that plays the episodes.
        token: Token for that server; default: the variable ``ENVKIT_TOKEN``.
        ca: PEM file of the certificates to trust for ``https://``, instead of the system's.
        outage_timeout_s: Seconds for which calls wait for that server while it restarts; 0: they fail at once. The
            first connection never waits. If the restarted server lacks the session, `SessionNotFoundError` is raised.
        backend: For an environment that uses a sandbox as a tool: the kind of the sandbox, ``"auto"`` (the default),
            ``"local"`` or ``"docker"``, or ``"process"``, which isolates nothing.
        judge: For an environment that needs one: the language model that grades answers, as ``"MODEL@URL"`` of an
            endpoint with OpenAI's API, or an object.
        options: Default options of every episode; ``reset(options=...)`` overrides them. Local environments may accept
            more options, such as ``render_mode``; board games accept ``observation="grid"`` and ``action="index"``.

    Raises:
        UnknownEnvError: `env_id` is not registered; the message suggests the nearest id.
        OptionError: The environment rejects an option.
        UnreachableError: No server answers at `url`.
        UnauthorizedError, ForbiddenError: The server rejects the token.
        CapacityError: From a reset: no slot of the server at `url` became free within 60 s.
        UsageError: The environment needs a judge or a sandbox that this process does not have; the message names the
            remedy.
    """
    if url is not None:
        if backend is not None or judge is not None:
            raise ConfigError(["backend, judge: the server at url has its own; leave them out"])
        host = partial(_served_host, url, token, ca, outage_timeout_s)
        env: gymnasium.Env[Any, Any] = BlockingEnv(env_id, host, options)
    else:
        _check_only_served(token, ca)
        env = make_here(env_id, options, backend=backend, judge=judge)
    with suppress(gymnasium.error.Error):  # Gymnasium rejects some ids, and env.spec is then None
        kwargs = {"env_id": env_id, **({} if url is None else {"url": url}), **options}
        env.unwrapped.spec = GymnasiumSpec(f"{NAMESPACE}/{env_id}", "envkit:make", kwargs=kwargs)
    return env


def make_here(
    env_id: str, options: Mapping[str, Any], *, backend: str | None = None, judge: Judge | str | None = None
) -> gymnasium.Env[Any, Any]:
    """Create an environment in this process, as `make` does, but with options of any name, even ``url``."""
    unused = Resources.unused()
    env = open_env(env_id, unused if judge is not None else replace(unused, judge=None), **options)
    if not isinstance(env, AsyncEnv):
        return env
    with loop_thread() as portal:  # it was only created to check the options
        portal.call(close_env, env, env_id)
    return BlockingEnv(env_id, partial(_own_host, env_id, options, backend, judge), options)


@asynccontextmanager
async def _served_host(
    url: str, token: str | None, ca: Path | str | None, outage_timeout_s: float
) -> AsyncIterator[EnvHost]:
    """Open a host that plays episodes on a server, and outlasts its restarts."""
    from envkit.http.client.env_client import EnvClient  # slow to import

    outages = Outages(outage_timeout_s, _log.warning)
    async with EnvClient(url, token=token, ca=ca, wait_timeout_s=_SLOT_WAIT_S, outages=outages) as client:
        yield client


@asynccontextmanager
async def _own_host(
    env_id: str, options: Options, backend: str | None, judge: Judge | str | None
) -> AsyncIterator[SlotHost]:
    """Open a host for one episode at a time of one environment, with what it needs."""
    async with (
        open_resources(find(env_id).needs, backend=backend, judge=judge) as resources,
        slots(1, options, resources) as host,
    ):
        yield host


@asynccontextmanager
async def open_resources(
    needs: Collection[str],
    *,
    backend: str | None = None,
    judge: Judge | str | None = None,
    announce: Callable[[str], None] | None = None,
    views: Sequence[tuple[str, str]] = (),
) -> AsyncIterator[Resources]:
    """Open the resources that environments with these `needs` get from this process; see `make`, `open_tool_pool`."""
    async with AsyncExitStack() as parts:
        sandboxes: SandboxPool | None = None
        if "sandbox" in needs:
            from envkit.wiring.sandboxes.backends import open_tool_pool  # imported late: loads the backends

            opening = open_tool_pool(backend or "auto", announce=announce, views=views)
            sandboxes = await parts.enter_async_context(opening)
        if isinstance(judge, str):
            from envkit.wiring.judge import open_judge  # imported late: loads the client of endpoints

            judge = await parts.enter_async_context(open_judge(judge))
        yield Resources(sandboxes, judge)


def make_vec(
    env_id: str,
    num_envs: int,
    *,
    mode: VectorMode | None = None,
    autoreset: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    url: str | None = None,
    token: str | None = None,
    ca: Path | str | None = None,
    outage_timeout_s: float = OUTAGE_TIMEOUT_S,
    **options: Any,
) -> VectorEnv[Any, Any, Any]:
    """Create a vector environment of `num_envs` copies. All modes play the same episodes from the same seeds.

    Args:
        env_id: Registered id.
        num_envs: Number of copies.
        mode: ``"native"``: all copies together in NumPy, if the environment supports it. ``"sync"``: one after another
            in this process. ``"async"``: each in a separate process. None: native if supported, otherwise sync.
        autoreset: When a finished copy restarts: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``.
        url: As in `make`; served environments have no native mode.
        token: As in `make`.
        ca: As in `make`.
        outage_timeout_s: As in `make`.
        options: As in `make`.

    Raises:
        UnknownEnvError: `env_id` is not registered; the message suggests the nearest id.
        ConfigError: `num_envs`, `mode` or `autoreset` is invalid.
        OptionError: The environment rejects an option.
    """
    if not _is_count(num_envs):
        raise ConfigError([f"num_envs: must be an integer from 1, got {num_envs!r}"])
    if url is None:
        _check_only_served(token, ca)
    spec = find(env_id)
    try:
        when = AutoresetMode(autoreset)
    except ValueError:
        known = ", ".join(repr(one.value) for one in AutoresetMode)
        raise ConfigError([f"autoreset: must be one of {known}, got {autoreset!r}"]) from None
    if mode is None:
        mode = "sync" if spec.vector_entry_point is None or url is not None else "native"
    if mode == "native":
        if spec.vector_entry_point is None or url is not None:
            raise ConfigError([f"mode: no native mode for {env_id}, or url is set; use 'sync' or 'async'"])
        envs: VectorEnv[Any, Any, Any] = registry.load(spec.vector_entry_point)(
            num_envs=num_envs, autoreset=when, **registry.defaults(spec, options)
        )
        return envs
    copies: list[Callable[[], gymnasium.Env[Any, Any]]] = [
        partial(make, env_id, url=url, token=token, ca=ca, outage_timeout_s=outage_timeout_s, **options)
    ] * num_envs
    if mode == "sync":
        return SyncVectorEnv(copies, autoreset_mode=when)
    if mode == "async":
        return _in_processes(copies, when)
    raise ConfigError([f"mode: must be 'native', 'sync' or 'async', got {mode!r}"])


def _in_processes(
    copies: Sequence[Callable[[], gymnasium.Env[Any, Any]]], autoreset: AutoresetMode
) -> AsyncVectorEnv[Any, Any]:
    """Return a vector environment that runs each copy in a separate process.

    Text observations cannot use shared memory, and without shared memory Gymnasium's autoreset has a bug: after a call
    of `reset`, a worker still considers its episode ended, so the next step resets again and ignores the action.
    Therefore `_SubprocessEnv` does the autoreset in each copy.
    """
    restarts = autoreset is AutoresetMode.NEXT_STEP
    envs: AsyncVectorEnv[Any, Any] = AsyncVectorEnv(
        [partial(_SubprocessEnv, copy, restarts=restarts) for copy in copies],
        shared_memory=False,
        autoreset_mode=AutoresetMode.DISABLED if restarts else autoreset,
    )
    envs.autoreset_mode = envs.metadata["autoreset_mode"] = autoreset
    return envs


class _SubprocessEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A copy of an environment that plays in a separate process.

    `restarts` is whether the first step after the end of an episode ignores its action and starts the next episode.
    """

    def __init__(self, make_copy: Callable[[], gymnasium.Env[Any, Any]], *, restarts: bool) -> None:
        super().__init__(make_copy())
        self._restarts = restarts
        self._is_over = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._is_over = False
        with _carry_errors():
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._is_over and self._restarts:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
        with _carry_errors():
            step = self.env.step(action)
        self._is_over = bool(step[2] or step[3])
        return step


class _CarriedError(Exception):
    """Carries an envkit error from a worker process to this process.

    Gymnasium re-raises a worker's error here as ``type(error)(error)``, but most envkit errors take other arguments.
    Workers therefore raise a `_CarriedError`. Given such an error, ``_CarriedError(...)`` returns its envkit error.
    """

    def __new__(cls, carried: Exception) -> Any:
        return carried.args[0] if isinstance(carried, cls) else super().__new__(cls, carried)

    def __str__(self) -> str:
        # Gymnasium also logs this text as a format string, so escape the percent signs.
        return super().__str__().replace("%", "%%")


@contextmanager
def _carry_errors() -> Iterator[None]:
    try:
        yield
    except EnvkitError as error:
        raise _CarriedError(error) from None


def _check_only_served(token: str | None, ca: Path | str | None) -> None:
    if token is not None or ca is not None:
        raise ConfigError(["url: not set, but token and ca are only for a server; set url, or leave out token and ca"])


def _is_count(number: object) -> bool:
    return isinstance(number, Integral) and int(number) >= 1


def open_env(env_id: str, resources: Resources = NO_RESOURCES, /, **options: JSON) -> AnyEnv:
    """Create an environment and return what its entry point returns, without an adapter around it.

    Raises:
        UsageError: The environment needs something that `resources` does not have.
        UnknownEnvError: `env_id` is not registered; the message suggests the nearest id.
        OptionError: The environment rejects an option or does not know it.
    """
    spec = find(env_id)
    entry_point, chosen = registry.load(spec.entry_point), registry.defaults(spec, options)
    needed = {**resources.arguments(spec), **_with_data(spec, builds=resources.builds_data)}
    try:
        env: AnyEnv = entry_point(**needed, **chosen)
    except TypeError:
        _check_known(chosen, entry_point)
        raise
    if spec.success_return is not None:
        if isinstance(env, AsyncEnv):
            env.success_return = spec.success_return
        else:
            env.metadata = {**env.metadata, "success_return": spec.success_return}
    return env


def _check_known(options: Mapping[str, Any], entry_point: Callable[..., Any]) -> None:
    """Raise `OptionError` for an option that `entry_point` does not accept."""
    parameters = inspect.signature(entry_point).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        for name in options:
            if name not in parameters:
                raise OptionError(name, f"no such option{did_you_mean(name, parameters)}") from None


def refuse_foreign(env_id: str, found: Options, chosen: Options, source: str, *, flag: str = "--option ") -> None:
    """Check options that come from a file, which may be of others; the user's own choices override them.

    Nothing is checked if the environment is not registered here. `source` says what the file is, and `flag` what the
    user writes before ``KEY=VALUE``.

    Raises:
        UsageError: The file sets an option that only the user may set; see `envkit.registry.EnvSpec.operator_options`.
    """
    try:
        names = [name for name in registry.foreign_choices(find(env_id), found) if name not in chosen]
    except UnknownEnvError:
        return
    if names:
        words = " ".join(flag + shlex.quote(f"{name}={json.dumps(found[name])}") for name in names)
        raise UsageError(f"{source} sets {', '.join(names)}, which only you may set; to use its values, add: {words}")


def open_expert(env_id: str, options: Options | None = None) -> Expert:
    """Return the expert of an environment for episodes with `options`, or raise `ConfigError` without one."""
    spec = find(env_id)
    if spec.expert is None:
        raise ConfigError([f"env.id: {env_id} has no expert"])
    expert: Expert = open_helper(spec, spec.expert, options or {})
    return expert


def open_helper(spec: EnvSpec, entry_point: str | Callable[..., Any], options: Options) -> Any:
    """Return the expert, a player or the vocabulary of an environment: call its entry point as the environment's."""
    return registry.load(entry_point)(**_with_data(spec), **registry.defaults(spec, options))


def _with_data(spec: EnvSpec, *, builds: bool = True) -> dict[str, Any]:
    """Return the argument `data` of an entry point, if the environment has data."""
    return {"data": data.DataFolders(spec, builds=builds)} if spec.data else {}


def slots(
    capacity: int,
    options: Options | None = None,
    resources: Resources = NO_RESOURCES,
    *,
    queued: Callable[[], int] = lambda: 0,
) -> SlotHost:
    """Return a host that plays any registered environment in this process.

    Every environment is created with `options`, since it may accept some only then: those of a task are passed to its
    reset. `queued` is as in `SlotHost`.
    """

    def open_attributed(env_id: str) -> AnyEnv:
        with attributed(env_id, "__init__"):
            return open_env(env_id, resources, **(options or {}))

    return SlotHost(open_attributed, capacity, queued)
