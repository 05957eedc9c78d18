"""The proxies that the suite checks: our own, with a scripted policy behind it, or any other at a URL.

In a block of `OwnProxy.episode`, the test is the agent; after it, `Agent.trains` checks what became of its calls. Of a
proxy of others, only what its clients see is checked: `Agent.trains` then checks nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import anyio
import pytest
from anyio.from_thread import BlockingPortal

from envkit import clock
from envkit.http.server.server import serve
from envkit.trainer_bridge.agents.programs import AgentTask, FunctionAgent
from envkit.trainer_bridge.agents.proxy import AgentProxy
from envkit.types import StopReason
from tests.conformance.agents.client import ROUTES, TIMEOUT_S, Client, Exchange, Json
from tests.trainer_bridge.agents.agents import LetterEngine, Played, play_agent

KEEP_ALIVE_S = 0.03
STALLS_AFTER, FAILS_AFTER = "x-stalls-after", "x-fails-after"
"""Header of a request whose client receives nothing after the part of the response with this text: because it is slow,
or because it has gone and the server raises an error, as ASGI allows.
"""


AnyProxy: TypeAlias = "OwnProxy | ForeignProxy"


class Agent(Client):
    """The client of one episode, and what became of the episode.

    Attributes:
        played: The episode, after the end of its block; None with a proxy of others.
        api_key: What the clients of OpenAI and Anthropic send.
        num_words: Number of words that do not fit into the context.
    """

    played: Played | None = None
    api_key = "unused"
    num_words = 100

    def needs(self, route: str) -> None:
        """Skip the test if the proxy does not have this route."""

    def begun(self, *messages: Json, **settings: Any) -> Exchange:
        """Ask the policy, and return when it samples an answer that waits."""
        return self.begin(*messages, **settings)

    def release(self) -> None:
        """Let the policy answer the calls that wait."""

    def scripted(self, found: object, expected: object) -> None:
        """Check what follows from the scripted answers."""

    def settle(self, waiting: int = 0) -> None:
        """Wait until `waiting` requests are in progress, and the proxy has noticed which clients have gone."""
        clock.run(partial(anyio.sleep, 0.2))

    def trains(self, *rows: str, ends: StopReason = StopReason.TERMINATED, **masked: int) -> None:
        """Check the samples of the episode, and the number of tokens that are masked by cause; see `Played.rows`."""


class ForeignAgent(Agent):
    """The client of a proxy of others. `ask` requires an answer; `begin` does not."""

    num_words = 300_000

    def __init__(self, proxy: ForeignProxy) -> None:
        super().__init__(proxy.url)
        self._routes = proxy.routes
        self.model = proxy.model or self.model
        if proxy.key:
            self.api_key, self.headers = proxy.key, {"authorization": f"Bearer {proxy.key}"}

    def needs(self, route: str) -> None:
        if route in {*ROUTES} - {*self._routes}:
            pytest.skip(f"ENVKIT_AGENT_PROXY_ROUTES: the proxy does not have {route}")

    def send(self, route: str, body: object = None, **settings: Any) -> Exchange:
        self.needs(route.removesuffix("/count_tokens"))
        return super().send(route, body, **settings)

    def ask(self, *messages: Json, **settings: Any) -> Exchange:
        asked = super().ask(*messages, **settings)
        assert asked.status == 200, asked.content
        return asked


class OwnAgent(Agent):
    """The client of an episode of our own proxy."""

    def __init__(
        self, proxy: OwnProxy, engine: LetterEngine, task: AgentTask, ended: anyio.Event, playing: Future[Played]
    ) -> None:
        super().__init__(task.base_url)
        self.key = task.api_key
        self._proxy = proxy
        self._engine = engine
        self._ended = ended
        self._playing = playing

    def settle(self, waiting: int = 0) -> None:
        self._proxy.until(lambda: self._proxy.num_open == waiting)

    def begun(self, *messages: Json, **settings: Any) -> Exchange:
        before = self._engine.num_waiting
        asked = self.begin(*messages, **settings)
        self._proxy.until(lambda: self._engine.num_waiting > before)
        return asked

    def until_stopped(self) -> None:
        """Wait until no sampling waits."""
        self._proxy.until(lambda: not self._engine.num_waiting)

    def release(self) -> None:
        self._proxy.portal.call(self._engine.release)

    def scripted(self, found: object, expected: object) -> None:
        assert found == expected, found

    def release_when(self, is_so: Callable[[], bool]) -> Future[None]:
        """Let the policy answer the calls that wait once `is_so` returns true."""

        async def wait() -> None:
            await _until(is_so)
            self._engine.release()

        return self._proxy.portal.start_task_soon(wait)

    def end(self) -> None:
        """End the agent, and with it the episode."""
        self._proxy.portal.call(self._ended.set)
        self.played = self._playing.result(TIMEOUT_S)

    @property
    def rows(self) -> list[str]:
        """The samples; see `Played.rows`."""
        assert self.played is not None, "the episode has not ended"
        return self.played.rows

    def trains(self, *rows: str, ends: StopReason = StopReason.TERMINATED, **masked: int) -> None:
        assert self.rows == sorted(rows), self.rows
        assert self.played is not None
        assert self.played.masked == masked, self.played.masked
        assert self.played.trajectory.outcome.stop is ends, self.played.trajectory.outcome


class OwnProxy:
    """Our proxy, served by our own server in the thread of `portal`.

    Attributes:
        agents: The agents, whose connections are still to be closed.
        num_requests: Number of requests so far.
        num_open: Number of those in progress.
    """

    def __init__(self, portal: BlockingPortal) -> None:
        self.portal = portal
        self.agents: list[Agent] = []
        self.num_requests = self.num_open = 0
        self.address = ""
        self._proxy = AgentProxy(keep_alive_s=KEEP_ALIVE_S)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_request = scope["type"] == "http"
        headers = dict(scope.get("headers", ()))
        stalls, fails = (headers.get(name.encode(), b"\0") for name in (STALLS_AFTER, FAILS_AFTER))
        last = b""

        async def send_slowly(message: Any) -> None:
            nonlocal last
            if fails in last:
                raise OSError("the client has gone")
            if stalls in last:
                await anyio.sleep_forever()
            last = message.get("body", b"")
            await send(message)

        self.num_requests += is_request
        self.num_open += is_request
        try:
            await self._proxy(scope, receive, send_slowly if is_request else send)
        finally:
            self.num_open -= is_request

    async def drain(self, timeout_s: float) -> None:
        await self._proxy.drain(timeout_s)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """Serve the proxy at a free port."""
        ready = anyio.Event()

        def on_ready(address: str) -> None:
            self.address = address
            ready.set()

        async with clock.background_tasks() as tasks:
            tasks.start_soon(partial(serve, self, port=0, on_ready=on_ready, handle_signals=False, drain_s=0.0))
            await ready.wait()
            yield

    @contextmanager
    def episode(self, *answers: str | Exception, **settings: Any) -> Iterator[OwnAgent]:
        """Play an episode whose agent is the block.

        Args:
            answers: What the policy answers; see `LetterEngine`.
            settings: Those of `play_agent`.
        """
        tasks: Future[AgentTask] = Future()
        ended = self.portal.call(anyio.Event)
        engine = LetterEngine(*answers)

        async def work(task: AgentTask) -> None:
            tasks.set_result(task)
            await ended.wait()

        async def main() -> Played:
            agent = FunctionAgent(work, self._proxy, self.address)
            return await play_agent(agent, engine, **settings)

        playing = self.portal.start_task_soon(main)
        agent = OwnAgent(self, engine, tasks.result(TIMEOUT_S), ended, playing)
        self.agents.append(agent)
        try:
            yield agent
        except BaseException:
            self.portal.call(ended.set)
            raise
        agent.end()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so` returns true."""
        self.portal.call(_until, is_so)

    @contextmanager
    def serving(self, calls: Any) -> Iterator[Client]:
        """Yield a client of `calls`, which has those methods of `EpisodeCalls` that the client needs."""
        secret = self.portal.call(self._proxy.add, calls)
        client = Agent(f"{self.address}/e/{secret}/v1")
        self.agents.append(client)
        yield client
        self.portal.call(self._proxy.end, secret)


async def _until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110 - what it waits for sets no event
            await anyio.sleep(0.001)


@dataclass
class ForeignProxy:
    """A proxy of others.

    Attributes:
        url: The base URL as OpenAI's clients take it, without a slash at its end.
        key: The API key; empty if it needs none.
        model: Name of the model; empty if any name will do.
        routes: Those of `ROUTES` that it has.
        agents: The agents, whose connections are still to be closed.
    """

    url: str
    key: str = ""
    model: str = ""
    routes: Sequence[str] = ROUTES
    agents: list[Agent] = field(default_factory=list)

    @contextmanager
    def episode(self, *answers: str | Exception, **settings: Any) -> Iterator[Agent]:
        """Yield an agent; what it is answered is up to the proxy."""
        self.agents.append(ForeignAgent(self))
        yield self.agents[-1]
