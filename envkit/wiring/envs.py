"""Environments by name: `make`, `make_vec`, and hosts of slots."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from envkit import registry
from envkit.env import AsyncEnv, BlockingEnv
from envkit.errors import ConfigError
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


def make(env_id: str, *, url: str | None = None, **options: Any) -> gymnasium.Env[Any, Any]:
    """Make an environment: text in, text out, unless the world is asked for something else.

    Args:
        env_id: Registered id, such as ``"Sokoban-v0"``.
        url: Address of an `envkit serve`; the episodes are then played there.
        options: Defaults of every episode, which ``reset(options=...)`` overrides. Worlds made here may know more, such
            as ``render_mode``, and board games ``observation="grid"`` and ``action="index"``.

    Raises:
        UnknownEnvError: No such id; the message names the nearest one.
        OptionError: The environment refuses an option.
        UnreachableError: Nothing answers at `url`.
    """
    if url is not None:
        from envkit.http.client import EnvClient

        return BlockingEnv(env_id, partial(EnvClient, url), options)
    world = open_world(env_id, **options)
    if isinstance(world, AsyncEnv):
        return BlockingEnv(env_id, partial(_one_slot, world), options)
    return world


def make_vec(
    env_id: str,
    num_envs: int,
    *,
    mode: VectorMode | None = None,
    autoreset: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    **options: Any,
) -> VectorEnv[Any, Any, Any]:
    """Make `num_envs` copies that step together. All modes play the same episodes from the same seeds.

    Args:
        env_id: Registered id.
        num_envs: Number of copies.
        mode: ``"native"`` steps them all at once in NumPy, where the world can; ``"sync"`` one after another in this
            process; ``"async"`` each in a process of its own. None takes native where there is one, otherwise sync.
        autoreset: When a finished copy starts again: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``.
        options: As in `make`.

    Raises:
        UnknownEnvError: No such id; the message names the nearest one.
        ConfigError: `num_envs`, `mode` or `autoreset` is refused.
        OptionError: The environment refuses an option.
    """
    if num_envs < 1:
        raise ConfigError([f"num_envs: must be at least 1, got {num_envs}"])
    spec = find(env_id)
    when = _autoreset(autoreset)
    if mode is None:
        mode = "sync" if spec.vector_entry_point is None or "url" in options else "native"
    if mode == "native":
        if spec.vector_entry_point is None or "url" in options:
            raise ConfigError([f"mode: {env_id} cannot be stepped natively here; take 'sync' or 'async'"])
        envs: VectorEnv[Any, Any, Any] = registry.load(spec.vector_entry_point)(
            num_envs=num_envs, autoreset=when, **registry.defaults(spec, options)
        )
        return envs
    copies: list[Callable[[], gymnasium.Env[Any, Any]]] = [partial(make, env_id, **options)] * num_envs
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
    if autoreset is not AutoresetMode.NEXT_STEP:
        return AsyncVectorEnv(copies, shared_memory=False, autoreset_mode=autoreset)
    envs: AsyncVectorEnv[Any, Any] = AsyncVectorEnv(
        [partial(_StartsAgain.around, copy) for copy in copies],
        shared_memory=False,
        autoreset_mode=AutoresetMode.DISABLED,
    )
    envs.autoreset_mode = envs.metadata["autoreset_mode"] = autoreset
    return envs


class _StartsAgain(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The step after the end of an episode begins the next one, whatever its action is."""

    _is_over = False

    @classmethod
    def around(cls, make_copy: Callable[[], gymnasium.Env[Any, Any]]) -> _StartsAgain:
        return cls(make_copy())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._is_over = False
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._is_over:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
        step = self.env.step(action)
        self._is_over = bool(step[2] or step[3])
        return step


def _autoreset(autoreset: AutoresetMode | str) -> AutoresetMode:
    try:
        return AutoresetMode(autoreset)
    except ValueError:
        known = ", ".join(repr(one.value) for one in AutoresetMode)
        raise ConfigError([f"autoreset: must be one of {known}, got {autoreset!r}"]) from None


def open_world(env_id: str, **options: JSON) -> World:
    """Make the world itself, without any face."""
    spec = find(env_id)
    world: World = registry.load(spec.entry_point)(**registry.defaults(spec, options))
    return world


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


def slots(capacity: int) -> SlotHost:
    """A host that plays any registered environment in this process."""
    return SlotHost(open_world, capacity)


@asynccontextmanager
async def _one_slot(world: AsyncEnv) -> AsyncIterator[EnvHost]:
    async with SlotHost(lambda env_id: world, 1) as host:
        yield host
