"""Every key of a server's file acts: another value changes what a client of the server sees, or what it starts.

The server of a file runs on virtual time with scripted sandboxes, and a client with a token makes the same calls. Its
answers, the sandboxes that were started, the files that were written and the error that ended the server are compared
with those of the file without the change. A second, short script starts real listeners.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from envkit import clock, register, registry
from envkit.config import RunConfig, ServeConfig, grammar
from envkit.config.grammar import Section
from envkit.errors import EnvkitError
from envkit.wiring.gateway import gateway, nodes
from envkit.wiring.gateway.gateway import serve_fleet
from envkit.wiring.gateway.token_store import open_tokens
from envkit.wiring.sandboxes import env_sandboxes
from envkit.wiring.sandboxes.backends import ChosenBackend
from tests.config.leaves import Leaf, leaves, put_leaf
from tests.config.test_train_keys import Content, Doors, Effects, FakeClient
from tests.sandbox.fake.backend import FakeBackend, Fate

Client = httpx.AsyncClient


@dataclass(frozen=True, slots=True)
class How:
    """How the effect of a key is shown; see `tests.config.test_train_keys.How`."""

    value: object = ...
    more: Mapping[str, object] = field(default_factory=dict)
    calls: Callable[[Client], Any] | None = None
    fate: Fate = field(default_factory=Fate)
    scopes: tuple[str, ...] = ("play", "sandbox")
    is_real: bool = False


BASE: Content = {
    "listen": {"port": 0},
    "envs": {"sandboxes": 1, "warm": 0, "trusted": []},
    "node": {"max_sandboxes": 16, "cpus": 16.0, "memory_mib": 16384, "disk_mib": 16384},
    "limits": {"tenant_share": 1.0},
    "access_log": None,
}


class Backend(FakeBackend):
    """The scripted backend of a server."""

    def disks(self) -> dict[str, tuple[int, int]]:
        return {}


class Servers:
    """Gives the effects of files of servers; works in `folder`."""

    def __init__(self, folder: Path, root: type[Section] = ServeConfig) -> None:
        self._folder = folder
        self._root = root
        self._found: dict[str, Effects] = {}

    def acts(self, leaf: Leaf, how: How) -> bool:
        """Return whether another value of a key has other effects."""
        base = BASE
        for key, value in how.more.items():
            base = put_leaf(base, key, value)
        value = leaf.other() if how.value is ... else how.value
        return self.effects(base, how) != self.effects(put_leaf(base, leaf.key, value), how)

    def effects(self, content: Content, how: How) -> Effects:
        """Return the effects of a file; each is served once."""
        key = f"{json.dumps(content)} {how.fate} {how.calls} {how.scopes} {how.is_real}"
        if key not in self._found:
            self._found[key] = self._serve(content, how)
        return self._found[key]

    def _serve(self, content: Content, how: How) -> Effects:
        folder = self._folder / str(len(self._found))
        folder.mkdir(exist_ok=True)
        text = json.dumps({"state": str(folder / "state"), **content}).replace("FOLDER", str(folder))
        backend = Backend(lambda number, rng: how.fate)
        seen: list[object] = []
        webhooks: list[str] = []
        error = ""

        async def choose(*_: object, **__: object) -> ChosenBackend:
            return ChosenBackend(backend, "scripted sandboxes")  # type: ignore[arg-type]

        async def serve(app: Any, *, host: str, **_: object) -> None:
            transport = httpx.ASGITransport(app, client=("10.0.0.1", 1))
            headers = {"authorization": f"Bearer {token}"}
            calls = Client(transport=transport, base_url="http://server", headers=headers, timeout=1e6)
            async with started(app), calls as client:
                async for line in (how.calls or play)(client):
                    seen.append(line)

        async def send(events: object, address: str) -> None:
            webhooks.append(address)

        def answered(address: str) -> None:
            free = r":\d+$" if content["listen"]["port"] == 0 else "$^"
            seen.append(re.sub(free, "", address.replace(str(folder), "")))
            os.kill(os.getpid(), signal.SIGTERM)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nodes, "choose", choose)
            patch.setattr(env_sandboxes, "connect", FakeClient.connect)
            patch.setattr(gateway, "send_alerts", send)
            if not how.is_real:
                patch.setattr(gateway, "serve", serve)
            try:
                config = grammar.check(json.loads(text), self._root)
                assert isinstance(config, ServeConfig)
                token = ""
                if how.scopes:
                    token = open_tokens(config.state).create("tenant", how.scopes)
                main = partial(serve_fleet, config, announce=lambda line: None, on_ready=answered)
                clock.run(main, virtual=not how.is_real)
            except EnvkitError as refusal:
                error = str(refusal).replace(str(folder), "")
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        specs = [sandbox.spec for sandbox in backend.sandboxes]
        limits = [(one.image, one.cpus, one.memory_mib, one.pids, one.disk_mib, one.untrusted) for one in specs]
        return {"error": error, "seen": seen, "files": files, "sandboxes": limits, "alerts": webhooks}


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[None]:
    """Start an ASGI application for the duration of the block."""
    events, give = anyio.create_memory_object_stream[dict[str, str]](1)
    is_up = anyio.Event()

    async def send(event: object) -> None:
        is_up.set()

    async with events, give, anyio.create_task_group() as tasks:
        tasks.start_soon(app, {"type": "lifespan", "state": {}}, give.receive, send)
        await events.send({"type": "lifespan.startup"})
        await is_up.wait()
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await events.send({"type": "lifespan.shutdown"})


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_SPECS", dict(registry._SPECS))
        register("Doors-v0", Doors)
        yield Servers(tmp_path_factory.mktemp("servers"))


# --- Calls -----------------------------------------------------------------------------------------------------------


async def play(client: Client) -> Any:
    """Play episodes."""
    for name in ("a", "b"):
        yield await answer(client, "PUT", f"/v1/sessions/{name}", json={"env_id": "Doors-v0", "seed": 1,
                                                                       "options": {"is_graded": True}})  # fmt: skip
    for turn in range(3):
        yield await answer(client, "POST", "/v1/sessions/a/step", json={"turn": turn, "action": "left"})
    yield await answer(client, "POST", "/v1/sessions/a/grade")
    yield await answer(client, "POST", "/v1/sessions/b/step", json={"turn": 0, "action": "x" * 5000})
    await anyio.sleep(60)
    yield await answer(client, "POST", "/v1/sessions/b/step", json={"turn": 1, "action": "left"})


SPEC = {"cpus": 2.0, "memory_mib": 512, "disk_mib": 512}


async def use_sandboxes(client: Client) -> Any:
    """Start sandboxes."""
    for name in ("a", "b", "c"):
        yield await answer(client, "PUT", f"/v1/sandboxes/{name}", json=SPEC)
    for more in ({"network": "open"}, {"profile": "system"}, {"image": "swe/one"}):
        yield await answer(client, "PUT", f"/v1/sandboxes/{next(iter(more))}", json=more)
    await anyio.sleep(60)
    yield await answer(client, "GET", "/v1/sandboxes/a")


async def wait(client: Client) -> Any:
    """Look at the sandbox `a` for an hour."""
    yield await answer(client, "PUT", "/v1/sandboxes/a", json=SPEC)
    for _ in range(100):
        await anyio.sleep(2)
        yield await answer(client, "GET", "/v1/sandboxes/a")


async def shut_down(client: Client) -> Any:
    """Shut the server down while an episode runs."""
    yield await answer(client, "PUT", "/v1/sessions/a", json={"env_id": "Doors-v0", "seed": 1})
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(100):
        await anyio.sleep(1)
        yield await answer(client, "PUT", "/v1/sessions/b", json={"env_id": "Doors-v0", "seed": 1})


async def list_nodes(client: Client) -> Any:
    """List the nodes on other machines."""
    reply = await client.get("/v1/nodes")
    yield [(one["node"], one["url"], one["why"]) for one in reply.json()["nodes"]]


async def answer(client: Client, verb: str, path: str, **content: Any) -> object:
    """Return the status and the title of an answer, and after how many seconds it came."""
    began = clock.now()
    reply = await client.request(verb, path, **content)
    body = reply.json() if reply.content and "json" in reply.headers.get("content-type", "") else {}
    kept = {key: body.get(key) for key in ("title", "state", "reward", "grade") if isinstance(body, dict)}
    return verb, path, reply.status_code, kept, round(clock.now() - began, 1)


# --- Keys ------------------------------------------------------------------------------------------------------------

SANDBOXES = How(calls=use_sandboxes)
NONE = {"backend": "none"}
REAL = How(more=NONE, is_real=True)
WARM = {"warm": [{"count": 1}]}
ENDS = Fate(dies_after_s=10.0)
NOWHERE = How(calls=list_nodes, scopes=("admin",), more={"nodes": [{"url": "https://127.0.0.1:9"}]})

SERVE: Mapping[str, How] = {
    "backend": How("none", calls=use_sandboxes),
    "listen.host": replace(REAL, value="0.0.0.0", scopes=()),
    "listen.port": replace(REAL, value=45871),
    "listen.socket": replace(REAL, value="FOLDER/socket"),
    "listen.certificate": replace(REAL, value="/no/such/file", more={**NONE, "listen.key": "/no/such/key"}),
    "listen.key": replace(REAL, value="/no/such/file", more={**NONE, "listen.certificate": "/no/such/certificate"}),
    "node.max_sandboxes": replace(SANDBOXES, value=2),
    "node.cpus": replace(SANDBOXES, value=3.0),
    "node.memory_mib": replace(SANDBOXES, value=1800),
    "node.disk_mib": replace(SANDBOXES, value=600),
    "nodes.url": replace(NOWHERE, value="http://127.0.0.1:19"),
    "nodes.token_file": replace(NOWHERE, value="/no/such/file"),
    "envs.sandboxes": How(2),
    "envs.capacity": How(1),
    "envs.warm": How(1),
    "envs.image": How("games:2"),
    "envs.memory_mib": How(256),
    "envs.cpus": How(0.5),
    "envs.trusted": How(["Gone-v0"]),
    "model": How("./no/such/model", NONE),
    "envs.judge": How("no-address", {"envs.trusted": ["Terminal-v0"]}),
    "warm.count": How(2, WARM),
    "warm.image": How("own:1", WARM),
    "warm.cpus": How(0.5, WARM),
    "warm.memory_mib": How(256, WARM),
    "warm.pids": How(99, WARM),
    "warm.disk_mib": How(99, WARM),
    "warm.untrusted": How(value=True, more=WARM),
    "liveness.lost_s": How(20.0, calls=wait, fate=Fate(hangs_after_s=10.0)),
    "restarts.budget": How(2, calls=wait, fate=ENDS),
    "restarts.window_s": How(5.0, calls=wait, fate=ENDS),
    "limits.request_bytes": How(1000),
    "limits.step_timeout_s": How(0.5),
    "limits.reset_timeout_s": How(1.0),
    "limits.grade_timeout_s": How(1.0),
    "limits.session_ttl_s": How(30.0),
    "limits.sandbox_ttl_s": replace(SANDBOXES, value=30.0),
    "limits.sandboxes_per_tenant": replace(SANDBOXES, value=1),
    "limits.tenant_share": replace(SANDBOXES, value=0.2),
    "limits.networks": replace(SANDBOXES, value=["open"]),
    "limits.profiles": replace(SANDBOXES, value=["strict", "system"]),
    "limits.images": replace(SANDBOXES, value=["swe/*"]),
    "alerts.webhook": How("http://127.0.0.1:9/hook"),
    "drain_s": How(20.0, calls=shut_down),
    "access_log": How("FOLDER/access.log"),
    "state": How("FOLDER/elsewhere"),
}
"""How the effects of keys are shown; a key that is missing here gets the value of `Leaf.other` and `play`."""

NOT_SHOWN: Mapping[str, str] = {
    "envs.tool_episodes": "needs a trusted worker, a process: tests/e2e/fleet/test_trusted_worker.py",
}
"""Keys whose effects need more than this test has, each with the test that shows them. The list may only shrink."""

LEAVES = {leaf.name: leaf for leaf in leaves(ServeConfig)}


@pytest.mark.parametrize("name", [name for name in LEAVES if name not in NOT_SHOWN])
def test_a_key_of_a_servers_file_acts(name: str, servers: Servers) -> None:
    assert servers.acts(LEAVES[name], SERVE.get(name, How())), f"{name} has no effect"


@pytest.mark.parametrize("calls", [play, use_sandboxes, wait, shut_down])
def test_the_same_calls_have_the_same_effects(calls: Callable[[Client], Any], servers: Servers) -> None:
    assert not servers.acts(LEAVES["listen.host"], How("localhost", calls=calls))  # nothing listens


def test_only_known_keys_are_listed() -> None:
    assert (SERVE.keys() | NOT_SHOWN.keys()) - LEAVES.keys() == set()
    assert SERVE.keys() & NOT_SHOWN.keys() == set()
    assert len(NOT_SHOWN) <= 1


def test_there_are_at_most_187_keys_beside_those_of_the_parts_of_an_algorithm() -> None:
    others = [leaf for leaf in leaves(RunConfig) if "[" not in leaf.name or not leaf.name.startswith("algorithm.")]
    assert len(LEAVES) + len(others) <= 187
