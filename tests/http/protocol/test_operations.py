"""The table of operations: the server offers all of them."""

from __future__ import annotations

import re

import httpx
import msgspec
from websockets.asyncio.client import connect

from envkit.http.protocol import operations
from envkit.http.protocol.operations import METHODS, OPERATIONS, WRITE_FILE
from envkit.http.protocol.sandbox_messages import ExecFrame
from envkit.sandbox.pool import Pool
from tests.http.remote_sandboxes import over_http

OF_NODES = (operations.NODE_FACTS, operations.JOIN, operations.NODE_LIST, operations.DRAIN)
"""What only a node or a server with nodes handles; see ``tests/wiring/gateway/test_remote_nodes.py``."""


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
