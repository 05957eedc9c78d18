"""Environment steps over the network: envkit's gateway, OpenEnv's server, and a bare server.

They are measured with each product's own client, as people use it, and with a client of minimal cost (`lean.py`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol, TypeAlias

from servers.lean import Http, WebSocket
from servers.peers_sandboxes import MissingPeerError
from servers.served import ECHO, OPENENV_VARIABLE, REPLY_VARIABLE
from servers.serving import Server, gateway, on_processor, uvicorn
from waiting import CallBy, FailedCallError, Findings

from envkit.http.client.env_client import EnvClient
from envkit.protocols import Episode
from envkit.types import Task

SESSIONS = 64
BY_CLIENTS = f"steps of {SESSIONS} games of Sokoban, by each product's own client"
BY_LEAN = f"steps of {SESSIONS} games of Sokoban"
BY_POST = "POST steps of an environment without work"
CONNECTIONS = 16
BATCHES = 2
"""Number of lists into which a client divides its sessions: the server works on one while we read the other's reply."""

_SERVER, _CLIENT = 0, 1
_MOVES = 9_000
"""Moves per episode, below the limit of 10,000. Episodes are long because level generation is not compared."""
_SEED = 1
_ACTIONS = ("<answer>up</answer>", "<answer>down</answer>")
"""A move and its reverse, in the level of `_SEED`."""
_TASK = Task("Sokoban-v0", _SEED, {"max_moves": 10_000})
_SOKOBAN = json.dumps({"env_id": _TASK.env_id, "seed": _TASK.seed, "options": dict(_TASK.options)})

Begin: TypeAlias = Callable[[str, int], Awaitable["Player"]]
"""Opens a caller's session, given the server's address and the caller's number."""
Sides: TypeAlias = dict[str, tuple[Server, Begin, int]]
"""The contestants: server, function that opens a caller's session, number of callers."""


class Player(Protocol):
    async def play(self) -> int:
        """Make one call, and return how many steps it made."""
        ...

    async def close(self) -> None: ...


class ClientPlayer:
    """One session of envkit through its own client, whose sessions share one WebSocket."""

    def __init__(self, client: EnvClient) -> None:
        self._client = client
        self._lease = AsyncExitStack()
        self._episode: Episode
        self._turn = 0

    @classmethod
    async def begin(cls, client: EnvClient, url: str, caller: int) -> ClientPlayer:
        player = cls(client)
        await player._reset()
        return player

    async def play(self) -> int:
        if self._turn == _MOVES:
            await self._reset()
        step = await self._episode.step(_ACTIONS[self._turn % 2])
        _expect(bool(step.observation.text) and not step.ended, str(step).encode())
        self._turn += 1
        return 1

    async def _reset(self) -> None:
        await self._lease.aclose()
        self._episode = await self._lease.enter_async_context(self._client.lease(_TASK))
        await self._episode.reset()
        self._turn = 0

    async def close(self) -> None:
        await self._lease.aclose()


class OpenEnvClientPlayer:
    """One session of OpenEnv through its own client."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._turn = 0

    @classmethod
    async def begin(cls, url: str, caller: int) -> OpenEnvClientPlayer:
        from openenv.core.generic_client import GenericEnvClient

        player = cls(GenericEnvClient(base_url=url))
        await player._client.connect()
        await player._reset()
        return player

    async def play(self) -> int:
        if self._turn == _MOVES:
            await self._reset()
        result = await self._client.step({"text": _ACTIONS[self._turn % 2]})
        _expect(bool(result.observation["text"]) and not result.done, str(result).encode())
        self._turn += 1
        return 1

    async def _reset(self) -> None:
        await self._client.reset(seed=_SEED)
        self._turn = 0

    async def close(self) -> None:
        await self._client.close()


class OpenEnvPlayer:
    """One session of OpenEnv on a WebSocket, as in its own client."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._turn = 0
        words = [{"type": "step", "data": {"text": action}} for action in _ACTIONS]
        self._steps = [json.dumps(word).encode() for word in words]

    @classmethod
    async def begin(cls, url: str, caller: int) -> OpenEnvPlayer:
        player = cls(await WebSocket.open_at(url, "/ws"))
        await player._reset()
        return player

    async def play(self) -> int:
        if self._turn == _MOVES:
            await self._reset()
        answer = await self._socket.call(self._steps[self._turn % 2])
        _expect(b'"observation"' in answer and b'"done":false' in answer, answer)
        self._turn += 1
        return 1

    async def _reset(self) -> None:
        answer = await self._socket.call(json.dumps({"type": "reset", "data": {"seed": _SEED}}).encode())
        _expect(b'"observation"' in answer, answer)
        self._turn = 0

    async def close(self) -> None:
        self._socket.close()


class SocketPlayer:
    """Sessions of envkit on one WebSocket. One message steps all of them."""

    def __init__(self, socket: WebSocket, names: Sequence[str]) -> None:
        self._socket = socket
        self._names = names
        self._turn = 0

    @classmethod
    async def begin(cls, url: str, caller: int) -> SocketPlayer:
        return await cls.begin_many(url, caller, 1)

    @classmethod
    async def begin_many(cls, url: str, caller: int, count: int = SESSIONS // BATCHES) -> SocketPlayer:
        names = [f"ws-{count}-{caller}-{number}" for number in range(count)]
        player = cls(await WebSocket.open_at(url, "/v1/ws"), names)
        await player._begin()
        return player

    async def play(self) -> int:
        if self._turn == _MOVES:
            await self._begin()
        move = '{"id":%d,"method":"step","params":{"session_id":"%s","turn":%d,"action":"%s"}}'
        turn, action = self._turn, _ACTIONS[self._turn % 2]
        await self._ask([move % (number, name, turn, action) for number, name in enumerate(self._names)])
        self._turn += 1
        return len(self._names)

    async def _begin(self) -> None:
        for method, more in (("delete", ""), ("create", f",{_SOKOBAN[1:-1]}")):
            form = '{"id":%d,"method":"%s","params":{"session_id":"%s"%s}}'
            await self._ask([form % (number, method, name, more) for number, name in enumerate(self._names)])
        self._turn = 0

    async def _ask(self, frames: Sequence[str]) -> None:
        message = frames[0] if len(frames) == 1 else f"[{','.join(frames)}]"
        answer = await self._socket.call(message.encode())
        count = answer.count(b'"result":{')
        while count < len(frames) and b'"error":{' not in answer:  # delayed replies arrive in further messages
            answer = await self._socket.more()
            count += answer.count(b'"result":{')
        _expect(count == len(frames), answer)

    async def close(self) -> None:
        self._socket.close()


class HttpPlayer:
    """Sessions of envkit over plain HTTP. One request steps all of them."""

    def __init__(self, http: Http, names: Sequence[str], begin: bytes = _SOKOBAN.encode()) -> None:
        self._http = http
        self._names = names
        self._begin_body = begin
        self._turn = 0

    @classmethod
    async def begin_many(cls, url: str, caller: int, count: int = SESSIONS // BATCHES) -> HttpPlayer:
        player = cls(await Http.open(url), [f"http-{count}-{caller}-{number}" for number in range(count)])
        await player._begin()
        return player

    async def play(self) -> int:
        if self._turn == _MOVES:
            await self._begin()
        turn, action = self._turn, _ACTIONS[self._turn % 2]
        steps = [f'{{"session_id":"{name}","turn":{turn},"action":"{action}"}}' for name in self._names]
        answer = await self._http.request("POST", "/v1/sessions:step", f"[{','.join(steps)}]".encode())
        _expect(answer.count(b'{"result":{') == len(steps), answer)
        self._turn += 1
        return len(steps)

    async def _begin(self) -> None:
        for name in self._names:
            await self._http.request("DELETE", f"/v1/sessions/{name}")
            await self._http.request("PUT", f"/v1/sessions/{name}", self._begin_body)
        self._turn = 0

    async def close(self) -> None:
        self._http.close()


class EchoPlayer:
    """One session of an environment that does no work, or the same step requests to a bare server."""

    def __init__(self, http: Http, name: str) -> None:
        self._http = http
        self._target = f"/v1/sessions/{name}/step"
        self._turn = 0
        self.answer = b""

    @classmethod
    async def begin(cls, url: str, caller: int) -> EchoPlayer:
        http, name = await Http.open(url), f"echo-{caller}"
        await http.request("PUT", f"/v1/sessions/{name}", json.dumps({"env_id": ECHO, "seed": 0}).encode())
        return cls(http, name)

    @classmethod
    async def begin_bare(cls, url: str, caller: int) -> EchoPlayer:
        return cls(await Http.open(url), f"echo-{caller}")

    async def play(self) -> int:
        body = b'{"turn":%d,"action":"<answer>up</answer>"}' % self._turn
        self.answer = await self._http.request("POST", self._target, body)
        self._turn += 1
        return 1

    async def close(self) -> None:
        self._http.close()


async def steps(findings: Findings, rounds: int, round_s: float) -> None:
    """Measure steps of Sokoban, and of an environment that does no work."""
    await _by_clients(findings, rounds, round_s)
    await _by_processor(findings, rounds, round_s)


async def steps_before_and_after(findings: Findings, python: str, rounds: int, round_s: float) -> None:
    """Measure steps per CPU second of the server of another checkout, and of this one.

    Args:
        findings: Prints the results.
        python: Interpreter of the other checkout, such as ``../before/.venv/bin/python``.
        rounds: Number of rounds.
        round_s: Seconds per round.
    """
    async with AsyncExitStack() as stack:
        frames: Sides = {}
        posts: Sides = {}
        for name, program in (("before", python), ("after", sys.executable)):
            for log in ("null", "access.log"):
                words = ("--backend", "none", "--set", f"access_log={log}")
                server = await stack.enter_async_context(gateway(*words, processor=_SERVER, python=program))
                if log == "null":
                    frames[name] = (server, SocketPlayer.begin, SESSIONS)
                    frames[f"{name}, lists of frames"] = (server, SocketPlayer.begin_many, BATCHES)
                posts[name if log == "null" else f"{name}, access log"] = (server, EchoPlayer.begin, CONNECTIONS)
        with on_processor(_CLIENT):
            await _rate(findings, BY_LEAN, frames, rounds, round_s)
            await _rate(findings, BY_POST, posts, rounds, round_s)


async def _by_clients(findings: Findings, rounds: int, round_s: float) -> None:
    """Measure each product with its own client, by wall-clock time. Servers and clients share all cores."""
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(gateway("--backend", "none"))
        client = await stack.enter_async_context(EnvClient(here.url))
        sokoban: Sides = {
            "envkit": (here, partial(ClientPlayer.begin, client), SESSIONS),
            # One message steps many sessions; OpenEnv's clients cannot send lists.
            "envkit, lists of frames": (here, SocketPlayer.begin_many, BATCHES),
        }
        for name, server in (await _openenv(stack, None)).items():
            sokoban[name] = (server, OpenEnvClientPlayer.begin, SESSIONS)
        await _rate(findings, BY_CLIENTS, sokoban, rounds, round_s, by_clock=True)


async def _by_processor(findings: Findings, rounds: int, round_s: float) -> None:
    """Measure a lean client's steps per CPU second of the server. Servers run on one core, this process on another."""
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(gateway("--backend", "none", processor=_SERVER))
        sandboxes = await stack.enter_async_context(gateway("--backend", "local", processor=_SERVER))
        sokoban: Sides = {
            "envkit": (here, SocketPlayer.begin, SESSIONS),
            "envkit, lists of frames": (here, SocketPlayer.begin_many, BATCHES),
            "envkit, POST of lists": (here, HttpPlayer.begin_many, BATCHES),
            "envkit in sandboxes": (sandboxes, SocketPlayer.begin, SESSIONS),
            "envkit in sandboxes, lists of frames": (sandboxes, SocketPlayer.begin_many, BATCHES),
        }
        for name, server in (await _openenv(stack, _SERVER)).items():
            sokoban[name] = (server, OpenEnvPlayer.begin, SESSIONS)

        answered = await _answer_of_echo(here.url)
        bare = uvicorn("starlette", package="starlette", variables={REPLY_VARIABLE: answered}, processor=_SERVER)
        echo: Sides = {
            "envkit": (here, EchoPlayer.begin, CONNECTIONS),
            "envkit in sandboxes": (sandboxes, EchoPlayer.begin, CONNECTIONS),
            "Starlette": (await stack.enter_async_context(bare), EchoPlayer.begin_bare, CONNECTIONS),
        }
        with on_processor(_CLIENT):
            await _rate(findings, BY_LEAN, sokoban, rounds, round_s)
            await _rate(findings, BY_POST, echo, rounds, round_s)


async def _openenv(stack: AsyncExitStack, processor: int | None) -> dict[str, Server]:
    """Start OpenEnv's server with and without async methods, if OpenEnv is installed."""
    servers = {}
    for name, kind in (("OpenEnv", "sync"), ("OpenEnv, async", "async")):
        server = uvicorn("openenv", package="openenv", variables={OPENENV_VARIABLE: kind}, processor=processor)
        try:
            servers[name] = await stack.enter_async_context(server)
        except MissingPeerError as error:
            print(f"  left out: {name}: {error}", flush=True)
    return servers


async def _rate(
    findings: Findings,
    what: str,
    sides: Sides,
    rounds: int,
    round_s: float,
    *,
    by_clock: bool = False,
) -> None:
    """Measure steps per CPU second of the servers, or with `by_clock` per second of wall-clock time."""
    players: dict[str, list[Player]] = {}
    try:
        for name, (server, begin, count) in sides.items():
            players[name] = []
            for caller in range(count):
                players[name].append(await begin(server.url, caller))

        def caller_of(name: str) -> CallBy:
            return lambda caller: players[name][caller].play()

        calls = {name: caller_of(name) for name in sides}
        for call in calls.values():  # the first call may load modules or data
            await call(0)
        callers = {name: count for name, (_, _, count) in sides.items()}
        cpu_s = None if by_clock else {name: server.cpu_s for name, (server, _, _) in sides.items()}
        await findings.rate(what, calls, callers=callers, rounds=rounds, round_s=round_s, cpu_s=cpu_s)
    finally:
        for each in players.values():
            for player in each:
                await player.close()


async def _answer_of_echo(url: str) -> str:
    """Return the gateway's reply to a step of `Echo`, with a turn number of four digits, as in most replies."""
    player = await EchoPlayer.begin(url, CONNECTIONS)
    await player.play()
    await player.close()
    return re.sub('"turn":1', '"turn":1000', player.answer.decode())


def _expect(held: bool, answer: bytes) -> None:
    if not held:
        raise FailedCallError(answer.decode(errors="replace"))
