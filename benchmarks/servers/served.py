"""The environments that the servers of benchmarks serve in addition to envkit's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import anyio
import gymnasium

from envkit.env import AsyncEnv
from envkit.spaces import Utf8Text
from envkit.types import Observation, Reset, Step

ECHO = "BenchmarkEcho-v0"
WAIT = "BenchmarkWait-v0"
OPENENV_VARIABLE = "ENVKIT_BENCH_OPENENV"
"""Environment variable. With the value ``async``, OpenEnv's environment has async methods beside those of its guide."""
REPLY_VARIABLE = "ENVKIT_BENCH_REPLY"


class Echo(gymnasium.Env[str, str]):
    """An environment that does no work: it returns the action as the observation."""

    observation_space = action_space = Utf8Text(1000)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return action, 0.0, False, False, {}


class Wait(AsyncEnv):
    """An environment whose steps wait, as for a program or a model; the option `wait_s` is their duration."""

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._wait_s: float = options["wait_s"]
        return Reset(Observation(""), {})

    async def step(self, action: str) -> Step:
        await anyio.sleep(self._wait_s)
        return Step(Observation(action), 0.0, False, False, {})

    async def close(self) -> None: ...


def bring() -> None:
    """Register `Echo` and `Wait`. This is the entry point of a package that `serving.py` creates."""
    from envkit import registry

    registry.register(ECHO, f"{__name__}:Echo")
    registry.register(WAIT, f"{__name__}:Wait")


def starlette() -> Any:
    """Return a minimal step server, which reads the body of a request and replies with fixed bytes."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    reply = os.environ[REPLY_VARIABLE].encode()

    async def step(request: Request) -> Response:
        await request.body()
        return Response(reply, media_type="application/json")

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(
        routes=[Route("/v1/sessions/{id}/step", step, methods=["POST"]), Route("/health", health, methods=["GET"])]
    )


def openenv() -> Any:
    """Return OpenEnv's server with envkit's Sokoban."""
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    from envkit.wiring.environments import make_here

    class Move(Action):  # type: ignore[misc]
        text: str

    class Room(Observation):  # type: ignore[misc]
        text: str
        info: dict[str, Any]

    class Sokoban(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._env = make_here("Sokoban-v0", {"max_moves": 10_000})
            self._steps = 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Room:
            text, info = self._env.reset(seed=seed)
            self._steps = 0
            return Room(text=text, info=info, reward=0.0, done=False)

        def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Room:
            text, reward, terminated, truncated, info = self._env.step(action.text)
            self._steps += 1
            return Room(text=text, info=info, reward=reward, done=terminated or truncated)

        @property
        def state(self) -> State:
            return State(episode_id=None, step_count=self._steps)

    class AsyncSokoban(Sokoban):
        async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Room:
            return self.reset(seed, episode_id, **more)

        async def step_async(self, action: Move, timeout_s: float | None = None, **more: Any) -> Room:
            return self.step(action, timeout_s, **more)

    kind = AsyncSokoban if os.environ.get(OPENENV_VARIABLE) == "async" else Sokoban
    return create_app(kind, Move, Room, env_name="sokoban", max_concurrent_envs=1000)
