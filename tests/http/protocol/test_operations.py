"""The table of operations: the server offers all of them, and each is written in few files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect

from envkit.http.protocol import operations
from envkit.http.protocol.operations import METHODS, OPERATIONS, WRITE_FILE, Operation
from envkit.http.protocol.sandbox_messages import ExecFrame
from envkit.sandbox.pool import Pool
from tests.http.remote_sandboxes import over_http

ROOT = Path(__file__).parents[3]
SOURCES = [*ROOT.joinpath("envkit", "http").rglob("*.py"), ROOT / "docs" / "http_reference.py"]
OF_NODES = (operations.NODE_FACTS, operations.JOIN, operations.NODE_LIST, operations.DRAIN)
"""What only a node or a server with nodes handles; see ``tests/wiring/gateway/test_remote_nodes.py``."""
SANDBOXES = ("envkit/protocols", "envkit/wiring/sandboxes", "sandbox/agent_client", "sandbox/pool")
"""Folders whose classes have the operations on a sandbox as methods."""


def test_the_document_has_every_route_of_the_table_and_every_type_that_it_names() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        answer = await client.get("/openapi.json")
        paths = answer.json()["paths"]
        routes = {f"{verb.upper()} {path}" for path, item in paths.items() for verb in item}
        assert routes == {one.route for one in OPERATIONS if one.verb not in ("", "WEBSOCKET")} - {
            "GET /",
            *(one.route for one in OF_NODES),
        }
        written = paths[WRITE_FILE.path]["put"]["parameters"]
        assert [one["name"] for one in written] == ["sandbox_id", "path", "mode", "user", "Idempotency-Key"]
        schemas = answer.json()["components"]["schemas"]
        assert set(re.findall(r"#/components/schemas/(\w+)", answer.text)) <= set(schemas)
        assert schemas["StepBody"]["required"] == ["turn", "action"]
        assert "422" not in answer.text

    over_http(main)


def test_every_method_of_the_table_is_handled() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        url = str(client.base_url).replace("http", "ws")
        async with connect(f"{url.rstrip('/')}/v1/ws", proxy=None) as socket:
            for name, operation in METHODS.items():
                if operation in OF_NODES:
                    continue
                await socket.send(msgspec.json.encode({"id": 1, "method": name, "params": {}}).decode())
                answer = msgspec.json.decode(await socket.recv())
                if any(field.required for field in msgspec.structs.fields(operation.request)):
                    assert answer["error"]["detail"].startswith("the field "), name
                else:
                    operation.reply_decoder.decode(msgspec.json.encode(answer["result"]))

    over_http(main)


def test_the_http_form_of_a_request_has_its_fields_in_the_path_and_the_body() -> None:
    request = ExecFrame(("a",), 5, sandbox_id="acme:ü/?", key="k")
    assert operations.EXEC.target(request) == "/v1/sandboxes/acme%3A%C3%BC%2F%3F/exec"
    assert msgspec.json.decode(operations.EXEC.content(request))["argv"] == ["a"]
    assert b"sandbox_id" not in operations.EXEC.content(request)


def files_of(operation: Operation[Any, Any], *more: str) -> list[str]:
    """Return the files about the API that name an operation or one of the types of its own."""
    (constant,) = (name for name, value in vars(operations).items() if value is operation)
    types = {operation.request.__name__, operation.reply.__name__} - {"NoBody", "DoneReply", "SandboxFrame"}
    word = re.compile(rf"\b({'|'.join([constant, *types, *more])})\b")
    return [str(path) for path in SOURCES if word.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", ["sandbox.stats", "sandbox.log", "sandbox.probe", "sandbox.snapshot", "envs"])
def test_the_api_of_a_plain_operation_is_written_in_four_files_and_tested_in_a_fifth(name: str) -> None:
    assert len(files_of(METHODS[name])) <= 4


@pytest.mark.parametrize("name", ["stats", "log", "probe", "snapshot", "program"])
def test_an_operation_on_a_sandbox_is_written_in_at_most_four_more_files(name: str) -> None:
    # the protocol, the client of the agent, the lease of the pool, and the facade for scripts
    method = re.compile(rf"^    ((async )?def {name}\(|{name} = )", re.MULTILINE)
    sources = {path for folder in SANDBOXES for path in (ROOT / folder).rglob("*.py")}
    sources.remove(ROOT / "envkit/protocols/launch.py")  # of processes
    found = [str(path) for path in sources if method.search(path.read_text(encoding="utf-8"))]
    assert 3 <= len(found) <= 4, found


def test_the_api_of_the_operation_with_the_most_parts_is_written_in_eight_files() -> None:
    assert len(files_of(operations.PROGRAM, "ProgramBody", "ProgramInput", "RemoteProgram", "SandboxStreams")) <= 8
