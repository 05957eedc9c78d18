"""`envkit serve --node`: serves the sandboxes of this machine to one gateway, which orders each start and end.

The gateway lists the node in its file, or the node joins it. The connections between them are as secret as their
addresses: use https, or a private network.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import anyio

from envkit import __version__, clock
from envkit.config.serving import ServeConfig
from envkit.errors import EnvkitError, UsageError
from envkit.fleet.alerts import log_events
from envkit.http.api.app import App, create_app
from envkit.http.auth.caller import Caller
from envkit.http.auth.localhost_only import is_loopback
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.http.auth.tokens import OneToken
from envkit.http.client.connect import read_token
from envkit.http.client.env_client import TOKEN_VARIABLE
from envkit.http.client.sandbox_client import SandboxClient
from envkit.http.protocol import node_messages as wire
from envkit.http.protocol import operations as table
from envkit.http.protocol.asgi import handles
from envkit.http.protocol.messages import NoBody
from envkit.http.server.middleware import AuthMiddleware
from envkit.http.server.server import MAX_CONNECTIONS, require_address, serve
from envkit.sandbox import machine
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import LivenessTimes
from envkit.sandbox.pool.node import Node
from envkit.sandbox.transfer import tar_stream
from envkit.wiring import data
from envkit.wiring.gateway.nodes import Kind, open_machine
from envkit.wiring.gateway.remote_nodes import name_of
from envkit.wiring.gateway.trusted import NoEnvironments

_log = logging.getLogger(__name__)

_JOIN_S = 5.0
"""Seconds between two calls with which a node joins: a gateway that was restarted knows it after this time."""
LIVENESS = LivenessTimes(interval_s=4.0, suspect_s=1e8, lost_s=2e8)
"""The pool of a node declares no sandbox lost that does not answer: its gateway does."""
_IMAGES_S = 30.0
_DRAIN_S = 1.0
_ANY = ("0.0.0.0", "::")


async def serve_node(
    config: ServeConfig,
    *,
    join: str | None,
    token_file: Path | None,
    announce: Callable[[str], None],
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the sandboxes of this machine to a gateway until SIGTERM or SIGINT; then stop them.

    Args:
        config: The configuration, of which a node uses `backend`, `listen`, `node` and `envs.image`.
        join: Address of the gateway to join; None for a gateway that lists this node.
        token_file: With `join`, file with a token of the gateway with the scope node or admin. Otherwise file with
            the token that the gateway must send, which is needed unless this node listens on loopback. None: the
            variable ENVKIT_TOKEN, if it is set.
        announce: Called with each line to print while the node starts.
        on_ready: Called once with the node's address, as soon as it accepts requests.

    Raises:
        UsageError: The address, the token, the backend or a key cannot be used; the message says what to do.
    """
    keys = {name: getattr(config, name) for name in ("nodes", "warm", "drain_s", "model")}
    if ignored := [name for name, value in {**keys, "envs.sandboxes": config.envs.sandboxes}.items() if value]:
        them = "it" if len(ignored) == 1 else "them"
        raise UsageError(f"{', '.join(ignored)}: no effect on a node, only on its gateway; leave {them} out")
    if config.backend in ("nodes", "none"):
        raise UsageError(f"backend: a node has sandboxes of its own, so it cannot be {config.backend}; leave it out")
    listen = config.listen
    require_address(**listen.address)
    given = os.environ.get(TOKEN_VARIABLE) if token_file is None else read_token(token_file, announce)
    own = secrets.token_urlsafe(32) if join is not None else given
    if own is None and listen.socket is None and not is_loopback(listen.host):
        remedy = "name a file with a token (--token-file), or set ENVKIT_TOKEN"
        raise UsageError(f"{listen.host} is reachable from other machines; {remedy}")
    async with AsyncExitStack() as parts:
        here = await parts.enter_async_context(open_machine(config))
        assert here.node is not None
        pool = await parts.enter_async_context(node_pool(here.node))
        tasks = await parts.enter_async_context(clock.background_tasks())
        facts = NodeFacts(here.node, here.kind)
        app = node_app(facts, pool)
        tasks.start_soon(facts.follow_images)
        tasks.start_soon(log_events, pool.events())
        announce(f"node: {here.what}; {machine.describe(here.node.capacity)}")

        def ready(address: str) -> None:
            if join is not None and own is not None:
                url = _reachable(address, join)
                tasks.start_soon(_keep_joined, join, given, wire.JoinFrame(name_of(url), url, own))
            if on_ready is not None:
                on_ready(address)

        tokens = None if own is None else OneToken(own)
        most = MAX_CONNECTIONS  # its only caller is the gateway
        await serve(
            AuthMiddleware(app, tokens, max_sockets=most, max_requests=most, errors=app.errors),
            **listen.address,
            on_ready=ready,
            drain_s=_DRAIN_S,
            byte_streams=True,
        )


def node_pool(node: Node) -> Pool:
    """Return the pool of a node. It starts whatever its gateway orders, which knows the capacity."""
    return Pool([Node(node.name, node.backend)], liveness_times=LIVENESS)


def node_app(facts: NodeFacts, pool: Pool) -> App:
    """Return the ASGI application of a node."""
    return create_app(
        NoEnvironments(),
        lazy=True,
        pool=pool,
        folder_transport=tar_stream,
        policy=SandboxPolicy(may_mount=True),
        handlers=(facts,),
    )


class NodeFacts:
    """Answers what the node is and has."""

    def __init__(self, node: Node, kind: Kind) -> None:
        self._node = node
        self._kind = kind
        self._run = uuid.uuid4().hex
        self._images: Sequence[str] = ()
        self._data = [source for source, _ in data.views()]

    @handles(table.NODE_FACTS)
    async def facts(self, body: NoBody, caller: Caller) -> wire.NodeReply:
        """Return what this node is and has. Only nodes (`envkit serve --node`) answer this call."""
        node = self._node
        capacity = {name: getattr(node.capacity, name) for name in wire.CapacityReply.__struct_fields__}
        return wire.NodeReply(
            run=self._run,
            version=__version__,
            backend=self._kind,
            capabilities=dict(node.backend.capabilities()),
            capacity=wire.CapacityReply(**capacity),
            processors=len(os.sched_getaffinity(0)),
            architecture=platform.machine(),
            python=sys.executable,
            at_s=clock.wall(),
            images=list(self._images),
            data=self._data,
        )

    async def follow_images(self) -> None:
        """Keep the list of Docker images up to date."""
        backend = self._node.backend
        while isinstance(backend, DockerBackend):
            try:
                self._images = await backend.image_names()
            except EnvkitError as error:
                _log.warning("cannot list the images: %s", error)
            await anyio.sleep(_IMAGES_S)


async def _keep_joined(gateway: str, token: str | None, body: wire.JoinFrame) -> NoReturn:
    """Join the gateway, and join it again after its restart."""
    logged, line = "", f"joined {gateway} as {body.node}"
    while True:
        try:
            async with SandboxClient(gateway, token) as client:
                while True:
                    await client.join(body)
                    if line != logged:
                        _log.info("%s", line)
                    logged = line
                    await anyio.sleep(_JOIN_S)
        except EnvkitError as error:
            failure = f"cannot join {gateway}: {error}"
            if failure != logged:
                _log.warning("%s", failure)
            logged = failure
        await anyio.sleep(_JOIN_S / 5)


def _reachable(address: str, gateway: str) -> str:
    """Return the address of this node for the gateway: instead of any address, the one that leads to the gateway."""
    scheme, _, _ = address.partition("://")
    parts = urlsplit(address)
    if parts.hostname not in _ANY:
        return address
    target = urlsplit(gateway)
    try:
        family, kind, _, _, where = socket.getaddrinfo(target.hostname, target.port or 443, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            host = probe.getsockname()[0]
    except OSError as error:
        raise UsageError(f"{gateway} cannot be found: {error}; listen on the address that leads there") from None
    return f"{scheme}://[{host}]:{parts.port}" if ":" in host else f"{scheme}://{host}:{parts.port}"
