"""Opens the player of a run: the policy itself, or a foreign agent that calls the policy through a proxy.

A foreign agent is a program, or a function that `agent` or a package has registered, or that is named as MODULE:NAME.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload
from urllib.parse import urlsplit

from anyio.abc import TaskStatus

from envkit import clock, installation
from envkit.config import kinds
from envkit.config.parts import AgentSection, RendererSection
from envkit.errors import ConfigError, UsageError, did_you_mean
from envkit.protocols import Engine, Player, Renderer, Sandbox
from envkit.registry import load
from envkit.trainer_bridge.agents.episode import Agent, AgentPlayer
from envkit.trainer_bridge.agents.messages import ChatMessage, ModelRequest
from envkit.trainer_bridge.agents.programs import AgentFunction, FunctionAgent, ProgramAgent
from envkit.trainer_bridge.agents.proxy import AgentProxy
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits

_Function = TypeVar("_Function", bound=AgentFunction)


@overload
def agent(function: _Function, /) -> _Function: ...
@overload
def agent(name: str, /) -> Callable[[_Function], _Function]: ...
def agent(given: str | AgentFunction, /) -> Any:
    """Register a function as an agent, for the key ``agent.function`` and the policy ``agent:NAME``.

    Use it as ``@envkit.agent("solver")``, or as ``@envkit.agent`` if the name is that of the function. The function
    gets an `envkit.AgentTask`, and may be async. Defining it again, as in a notebook, replaces it.

    Raises:
        UsageError: The name is empty or has a colon, or belongs to another function.
    """

    def register(function: AgentFunction, name: str) -> AgentFunction:
        if not name or ":" in name:
            raise UsageError(f"agent: {name!r} cannot be a name; use one without a colon, such as 'solver'")
        added = kinds.FAMILIES["agents"].added
        if name in added and _place(added[name]) != _place(function):
            raise UsageError(f"agent: {name!r} is already registered for {_place(added[name])}; choose another name")
        added[name] = function
        return function

    return partial(register, name=given) if isinstance(given, str) else register(given, given.__name__)


def _place(function: AgentFunction) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def function_of(name: str) -> AgentFunction:
    """Return the function of an agent, given its name or MODULE:NAME. Raises `UsageError` if it cannot be loaded."""
    function: AgentFunction
    if ":" not in name:
        if name not in (known := kinds.names("agents")):
            remedy = "import the module that registers it, or write MODULE:NAME"
            raise UsageError(f"no agent is called {name!r} ({remedy}){did_you_mean(name, known)}")
        function = kinds.find("agents", name)
        return function
    try:
        function = load(name)
    except (UsageError, ConfigError, ImportError, AttributeError, ValueError) as error:
        remedy = "; put its folder on the path, as PYTHONPATH=. does" if isinstance(error, ImportError) else ""
        raise UsageError(f"{name} cannot be loaded: {error}{remedy}") from error
    return function


@asynccontextmanager
async def open_player(
    section: AgentSection | None,
    engine: Engine,
    renderer: Renderer,
    limits: RolloutLimits,
    announce: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Player]:
    """Open the player of a run: the agent of `section`, or without one the policy itself."""
    if section is None:
        yield PolicyPlayer(engine, renderer, limits)
        return
    if not isinstance(renderer, ChatRenderer):
        raise UsageError("agent: an agent calls a model with a chat template; name one with engine.model")
    proxy = AgentProxy()
    async with _served(proxy) as address:
        playing: Agent
        if section.function:
            playing = FunctionAgent(function_of(section.function), proxy, address)
        else:
            inside = partial(_inside, address=address) if section.place == "sandbox" else None
            playing = ProgramAgent(section.command, section.env, proxy, address, inside)
        async with clock.background_tasks() as tasks:
            selects, stable = _selects(section), _without(section.ignore)
            player = AgentPlayer(playing, engine, renderer, limits, tasks, selects, stable)
            announce(f"agent: {section.function or section.command[0]}")
            yield player
            for (model, is_trained), count in player.models.most_common() if section.train else ():
                announce(f"agent: calls to the model {model!r}: {count}{'' if is_trained else ', not trained on'}")
            if section.ignore:
                announce(f"agent: calls from which agent.ignore removed text: {player.changed}")
            for name, count in player.unused.most_common():
                announce(f"agent: {count} requests set {name}, which has no effect")
            for error, count in player.failures.most_common(3):
                announce(f"agent: {count} episodes ended with an error of the agent: {error}")


def views_of(section: AgentSection | None) -> list[tuple[str, str]]:
    """Return the read-only mounts of an agent: pairs of a path of this machine and a path in the sandbox."""
    return [] if section is None else [(str(Path(one).resolve()), path) for path, one in section.views.items()]


def check_agent(section: AgentSection, renderer: RendererSection) -> list[str]:
    """Return the problems of the section, and of the renderer's keys that have no effect with an agent."""
    needless = {"history": renderer.history != "all", "system": getattr(renderer, "system", None) is not None}
    why = "has no effect, because an agent writes all messages itself; leave it out"
    problems = [f"renderer.{name}: {why}" for name, is_set in needless.items() if is_set]
    if bool(section.command) == bool(section.function):
        problems.append("agent: set either command or function")
    if section.function:
        needless = {"env": bool(section.env), "place": section.place == "beside"}
        problems += [f"agent.{name}: is for a command; leave it out" for name, is_set in needless.items() if is_set]
        try:
            function_of(section.function)
        except UsageError as error:
            problems.append(f"agent.function: {error}")
    problems += [f"agent.views: there is no {source}" for source in section.views.values() if not Path(source).exists()]
    for name in ("train", "ignore"):
        for pattern in getattr(section, name):
            try:
                re.compile(pattern)
            except re.error as error:
                problems.append(f"agent.{name}: {pattern!r} is no regular expression: {error}")
    return problems


def _selects(section: AgentSection) -> Callable[[ModelRequest], bool]:
    """Return a function that chooses the calls to train on."""
    patterns = [re.compile(pattern) for pattern in section.train]

    def selects(request: ModelRequest) -> bool:
        texts = [request.model, *(one.content for one in request.messages if one.role == "system")]
        return not patterns or any(pattern.search(text) for pattern in patterns for text in texts)

    return selects


def _without(patterns: list[str]) -> Callable[[ChatMessage], ChatMessage]:
    """Return a function that removes what changes between requests, such as the time, from a system message."""
    found = [re.compile(pattern) for pattern in patterns]

    def stable(message: ChatMessage) -> ChatMessage:
        content = message.content
        for pattern in found if message.role == "system" else ():
            content = pattern.sub("", content)
        return message if content == message.content else ChatMessage("system", content)

    return stable


@asynccontextmanager
async def _inside(sandbox: Sandbox, address: str) -> AsyncIterator[str]:
    from envkit.sandbox.egress.proxy import open_service

    target = urlsplit(address)
    assert target.port is not None, "the address of our own server"

    async def connect() -> socket.socket:
        stream = socket.socket()
        stream.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(stream, (target.hostname or "", target.port))
        except BaseException:
            stream.close()
            raise
        return stream

    async with open_service(sandbox, connect) as port:
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def _served(proxy: AgentProxy) -> AsyncIterator[str]:
    """Serve a proxy at a free port of 127.0.0.1, and yield its address."""
    installation.load("uvicorn")
    from envkit.http.server.server import serve

    async def serving(task_status: TaskStatus[str]) -> None:
        await serve(proxy, port=0, on_ready=task_status.started, handle_signals=False, drain_s=0.0)

    async with clock.background_tasks() as tasks:
        address: str = await tasks.start(serving)
        yield address
