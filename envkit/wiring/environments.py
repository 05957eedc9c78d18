"""Environments by name: `make`, `make_vec`, and hosts of slots."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from envkit import registry
from envkit.env import AsyncEnv, BlockingEnv, env_error
from envkit.errors import ConfigError, EnvkitError, OptionError, did_you_mean
from envkit.installation import explain
from envkit.protocols import EnvHost, Expert
from envkit.registry import EnvSpec
from envkit.types import JSON, Options
from envkit.vector import SlotHost, World
from envkit.wiring.catalogue import load_catalogue

VectorMode = Literal["native", "sync", "async"]


def registered() -> Sequence[EnvSpec]:
    """Every environment that `make` knows, by id."""
    load_catalogue()
    return list(registry.specs())


def find(env_id: str) -> EnvSpec:
    """Return the spec of `env_id`; see `envkit.registry.find`."""
    load_catalogue()
    return registry.find(env_id)


def make(
    env_id: str, *, url: str | None = None, token: str | None = None, ca: Path | str | None = None, **options: Any
) -> gymnasium.Env[Any, Any]:
    """Make an environment: text in, text out, unless the world is asked for something else.

    Args:
        env_id: Registered id, such as ``"Sokoban-v0"``.
        url: Address of an `envkit serve`; the episodes are then played there.
        token: What to show that server; the variable ``ENVKIT_TOKEN``, unless given.
        ca: PEM file of the certificates that an ``https://`` server is trusted by, instead of the system's.
        options: Defaults of every episode, which ``reset(options=...)`` overrides. Worlds made here may know more, such
            as ``render_mode``, and board games ``observation="grid"`` and ``action="index"``.

    Raises:
        UnknownEnvError: No such id; the message names the nearest one.
        OptionError: The environment refuses an option.
        UnreachableError: Nothing answers at `url`.
        UnauthorizedError, ForbiddenError: The server wants another token.
    """
    if url is not None:
        from envkit.http.client.env_client import EnvClient

        return BlockingEnv(env_id, partial(EnvClient, url, token=token, ca=ca), options)
    _check_only_served(token, ca)
    return make_here(env_id, options)


def make_here(env_id: str, options: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make an environment in this process, with options of whatever names; otherwise as `make`."""
    world = open_env(env_id, **options)
    if isinstance(world, AsyncEnv):
        return BlockingEnv(env_id, partial(_one_slot, world), options)
    return world


def make_vec(
    env_id: str,
    num_envs: int,
    *,
    mode: VectorMode | None = None,
    autoreset: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    url: str | None = None,
    token: str | None = None,
    ca: Path | str | None = None,
    **options: Any,
) -> VectorEnv[Any, Any, Any]:
    """Make `num_envs` copies that step together. All modes play the same episodes from the same seeds.

    Args:
        env_id: Registered id.
        num_envs: Number of copies.
        mode: ``"native"`` steps them all at once in NumPy, where the world can; ``"sync"`` one after another in this
            process; ``"async"`` each in a process of its own. None takes native where there is one, otherwise sync.
        autoreset: When a finished copy starts again: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``.
        url: As in `make`, like `token` and `ca`; there is no native mode for served worlds.
        token: What to show the server.
        ca: What to trust it by.
        options: As in `make`.

    Raises:
        UnknownEnvError: No such id; the message names the nearest one.
        ConfigError: `num_envs`, `mode` or `autoreset` is refused.
        OptionError: The environment refuses an option.
    """
    if not _is_count(num_envs):
        raise ConfigError([f"num_envs: must be an integer from 1, got {num_envs!r}"])
    if url is None:
        _check_only_served(token, ca)
    spec = find(env_id)
    when = _autoreset(autoreset)
    if mode is None:
        mode = "sync" if spec.vector_entry_point is None or url is not None else "native"
    if mode == "native":
        if spec.vector_entry_point is None or url is not None:
            raise ConfigError([f"mode: {env_id} cannot be stepped natively here; take 'sync' or 'async'"])
        envs: VectorEnv[Any, Any, Any] = registry.load(spec.vector_entry_point)(
            num_envs=num_envs, autoreset=when, **registry.defaults(spec, options)
        )
        return envs
    copies: list[Callable[[], gymnasium.Env[Any, Any]]] = [
        partial(make, env_id, url=url, token=token, ca=ca, **options)
    ] * num_envs
    if mode == "sync":
        return SyncVectorEnv(copies, autoreset_mode=when)
    if mode == "async":
        return _processes(copies, when)
    raise ConfigError([f"mode: must be 'native', 'sync' or 'async', got {mode!r}"])


def _processes(
    copies: Sequence[Callable[[], gymnasium.Env[Any, Any]]], autoreset: AutoresetMode
) -> AsyncVectorEnv[Any, Any]:
    """Run each copy in a process.

    Gymnasium's processes forget at a reset that an episode had ended, when observations do not travel by shared memory
    (as text cannot): the next step then starts yet another episode, and the action is lost. So the copies start again
    by themselves in its place.
    """
    starts_again = autoreset is AutoresetMode.NEXT_STEP
    envs: AsyncVectorEnv[Any, Any] = AsyncVectorEnv(
        [partial(_Copy.of, copy, starts_again=starts_again) for copy in copies],
        shared_memory=False,
        autoreset_mode=AutoresetMode.DISABLED if starts_again else autoreset,
    )
    envs.autoreset_mode = envs.metadata["autoreset_mode"] = autoreset
    return envs


class _Copy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """What plays in a process of its own.

    Args:
        env: The world.
        starts_again: Whether the step after the end of an episode begins the next one, whatever its action is.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], *, starts_again: bool) -> None:
        super().__init__(env)
        self._starts_again = starts_again
        self._is_over = False

    @classmethod
    def of(cls, make_copy: Callable[[], gymnasium.Env[Any, Any]], *, starts_again: bool) -> _Copy:
        return cls(make_copy(), starts_again=starts_again)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._is_over = False
        with _carried():
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._is_over and self._starts_again:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
        with _carried():
            step = self.env.step(action)
        self._is_over = bool(step[2] or step[3])
        return step


class _CarriedError(Exception):
    """Brings an error of envkit out of a process.

    Gymnasium raises ``type(error)(error)`` in place of an error there, which few of ours survive: they are not made
    from one argument. Made from one of its own kind, this gives the error that it carries.
    """

    def __new__(cls, carried: Exception) -> Any:
        return carried.args[0] if isinstance(carried, cls) else super().__new__(cls, carried)

    def __str__(self) -> str:
        return super().__str__().replace("%", "%%")  # Gymnasium also shows it, as a template without arguments


@contextmanager
def _carried() -> Iterator[None]:
    try:
        yield
    except EnvkitError as error:
        raise _CarriedError(error) from None


def _check_only_served(token: str | None, ca: Path | str | None) -> None:
    if token is not None or ca is not None:
        raise ConfigError(["url: is missing; a token and certificates go with the address of a server"])


def _is_count(number: object) -> bool:
    return isinstance(number, Integral) and int(number) >= 1


def _autoreset(autoreset: AutoresetMode | str) -> AutoresetMode:
    try:
        return AutoresetMode(autoreset)
    except ValueError:
        known = ", ".join(repr(one.value) for one in AutoresetMode)
        raise ConfigError([f"autoreset: must be one of {known}, got {autoreset!r}"]) from None


def open_env(env_id: str, /, **options: JSON) -> World:
    """Make the world itself, without any face.

    Raises:
        UnknownEnvError: No such id; the message names the nearest one.
        OptionError: The world refuses an option, or does not know it.
    """
    spec = find(env_id)
    entry_point, chosen = registry.load(spec.entry_point), registry.defaults(spec, options)
    try:
        world: World = entry_point(**chosen)
    except TypeError:
        _check_known(chosen, entry_point)
        raise
    return world


def _check_known(options: Mapping[str, Any], entry_point: Callable[..., Any]) -> None:
    """Raise `OptionError` if there is an option that `entry_point` does not take by name."""
    parameters = inspect.signature(entry_point).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        for name in options:
            if name not in parameters:
                raise OptionError(name, f"no such option{did_you_mean(name, parameters)}") from None


def open_expert(env_id: str, options: Options | None = None) -> Expert:
    """Return the world's own expert, for episodes with `options`.

    Raises:
        ConfigError: It has none.
    """
    spec = find(env_id)
    if spec.expert is None:
        raise ConfigError([f"env.id: {env_id} has no expert"])
    expert: Expert = registry.load(spec.expert)(**registry.defaults(spec, options or {}))
    return expert


def slots(capacity: int, options: Options | None = None) -> SlotHost:
    """Return a host that plays any registered environment in this process.

    Args:
        capacity: Number of episodes at once.
        options: What every world is made with. Tasks bring options by themselves; these are for worlds that take some
            nowhere else than where they are made.
    """

    def open_attributed(env_id: str) -> World:
        with attributed(env_id, "__init__"):
            return open_env(env_id, **(options or {}))

    return SlotHost(open_attributed, capacity)


@contextmanager
def attributed(env_id: str, call: str) -> Iterator[None]:
    """Turn an exception of the block into the `EnvError` of an environment; see `env_error`.

    A missing package of envkit's own extras stays an `ImportError`, which is reported with what installs it.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ImportError) and explain(error) is not None:
            raise
        raised = error if isinstance(error, EnvkitError) else env_error(error, env_id, call)
        raise raised from (None if raised is error else error)


@asynccontextmanager
async def _one_slot(world: AsyncEnv) -> AsyncIterator[EnvHost]:
    async with SlotHost(lambda env_id: world, 1) as host:
        yield host
