"""Fixtures of the protocol tests: three small environments, a host that counts its leases, a server."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self, cast

import anyio
import gymnasium

from envkit.env import AsyncEnv
from envkit.errors import CapacityError, OptionError, UnknownEnvError
from envkit.http.api.app import create_app
from envkit.http.server.middleware import Served
from envkit.http.server.server import serve
from envkit.local_host import SlotHost
from envkit.protocols import EnvHost, Episode
from envkit.spaces import Utf8Text
from envkit.types import Info, Observation, Options, Reset, Step, Task


class Count(gymnasium.Env[str, str]):
    """Counts its steps, echoes actions, and ends after `end` steps. Some actions make it misbehave."""

    observation_space = Utf8Text(4096)
    action_space = Utf8Text(4096)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        self.steps = 0
        self.end: int = (options or {}).get("end", 3)
        if self.end < 1:
            raise OptionError("end", "must be at least 1")
        return f"seed {seed}", {"legal_moves": ["on", "back"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if action == "raise":
            raise ValueError("boom")
        self.steps += 1
        info: Info = {"odd": cast("Any", object())} if action == "odd" else {"legal_moves": ["on", "back"]}
        text = {"surrogate": "\ud800", "long": "x" * 500_000}.get(action, f"{self.steps} {action}")
        return text, 0.5, self.steps == self.end, False, info


class Sleeper(AsyncEnv):
    """Sleeps for the seconds in the action ``sleep 5``. Its reset sleeps for the option `reset_s`.

    The option `limit_s` is its own limit of a step.
    """

    async def reset(self, *, seed: int, options: Options) -> Reset:
        await anyio.sleep(float(cast("Any", options.get("reset_s", 0.0))))
        self.steps = 0
        limit_s = cast("float | None", options.get("limit_s"))
        return Reset(Observation("awake"), {}, step_limit_s=limit_s)

    async def step(self, action: str) -> Step:
        self.steps += 1
        await anyio.sleep(float(action.removeprefix("sleep ")))
        return Step(Observation(f"{self.steps} slept"), 1.0, False, False, {})

    async def close(self) -> None:
        pass


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


class Graded(AsyncEnv):
    """Ends after one step; its grader sleeps for the option `grade_s`, and returns the option `grade` or raises it.

    The option `limit_s` is its own limit of the grader. With the option `full`, it finds no room for its sandbox.
    """

    async def reset(self, *, seed: int, options: Options) -> Reset:
        self.options, self.grades = options, 0
        if options.get("full"):
            raise CapacityError("no room for its sandbox")
        limit_s = cast("float | None", options.get("limit_s"))
        start = Observation("start", role="tool")
        return Reset(start, {}, "Be brief.", (TOOL,), is_graded=True, grade_limit_s=limit_s)

    async def step(self, action: str) -> Step:
        return Step(Observation(action, role="tool"), 0.25, action == "end", False, {})

    async def grade(self) -> float | None:
        self.grades += 1
        await anyio.sleep(float(cast("Any", self.options.get("grade_s", 0.0))))
        grade = self.options.get("grade", 1.0)
        if isinstance(grade, str):
            raise ValueError(grade)
        return None if grade is None else float(cast("Any", grade)) * self.grades

    async def close(self) -> None:
        pass


def open_env(env_id: str) -> Count | Sleeper | Graded:
    envs: Mapping[str, type[Count | Sleeper | Graded]] = {
        "Count-v0": Count,
        "Sleeper-v0": Sleeper,
        "Graded-v0": Graded,
    }
    if env_id not in envs:
        raise UnknownEnvError(env_id, envs)
    return envs[env_id]()


def slots(capacity: int = 4) -> SlotHost:
    return SlotHost(open_env, capacity)


class Lender(EnvHost):
    """Counts the leases of another host: open ones, and those left by an error."""

    def __init__(self, host: EnvHost) -> None:
        self.open = 0
        self.void = 0
        self._host = host

    @property
    def capacity(self) -> int:
        return self._host.capacity

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[Episode]:
        self.open += 1
        try:
            async with self._host.lease(task) as episode:
                yield episode
        except BaseException:
            self.void += 1
            raise
        finally:
            self.open -= 1


@asynccontextmanager
async def listening(app: Served, *, drain_s: float = 1.0, **settings: Any) -> AsyncIterator[str]:
    """Run a server for the duration of the block; yields the address."""
    addresses: list[str] = []
    is_ready = anyio.Event()

    def on_ready(address: str) -> None:
        addresses.append(address)
        is_ready.set()

    run = partial(serve, port=0, on_ready=on_ready, drain_s=drain_s, **{"handle_signals": False, **settings})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, app)
        await is_ready.wait()
        yield addresses[0]
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def serving(
    host: EnvHost, *, uds: str | None = None, drain_s: float = 1.0, **settings: Any
) -> AsyncIterator[str]:
    """Serve `host` for the duration of the block; yields the address."""
    async with listening(create_app(host, **settings), uds=uds, drain_s=drain_s) as address:
        yield address


class Line:
    """Connects to the Unix socket of a server, counts connections, and can break the last one."""

    def __init__(self, address: str) -> None:
        self._path = address.removeprefix("unix:")
        self._copies: list[socket.socket] = []

    @property
    def count(self) -> int:
        return len(self._copies)

    async def connect(self) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(self._path)
        except OSError:
            connected.close()
            raise
        connected.setblocking(False)
        self._copies.append(connected.dup())
        return connected

    def cut(self) -> None:
        self._copies[-1].shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for copy in self._copies:
            copy.close()
