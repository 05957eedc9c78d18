"""Generates the page about the HTTP API from the routes and message types of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from envkit.http.api.app import create_app
from envkit.http.protocol.operations import METHODS
from envkit.protocols import EnvHost, SandboxPool
from envkit.sandbox.transfer import tar_stream

HEAD = """\
# The HTTP API

The Python functions `envkit.make(url=...)` and `envkit.open_sandbox(url=...)` use this API to play environments and run
sandboxes on a server (`envkit serve`). Clients in other languages can do the same. The five calls to type first:

    curl http://127.0.0.1:8000/v1/envs                                                          # list the environments
    curl -X PUT http://127.0.0.1:8000/v1/sessions/a -d '{"env_id": "FrozenLake-v0", "seed": 1}' # start an episode
    curl http://127.0.0.1:8000/v1/sessions/a -X DELETE                                          # end it
    curl -X PUT http://127.0.0.1:8000/v1/sandboxes/sandbox-1 -d '{}'                                  # start a sandbox
    curl http://127.0.0.1:8000/openapi.json                                                     # this API as OpenAPI

[play.mjs](../examples/play.mjs) plays an episode in 60 lines of JavaScript.

- **Ids.** The client chooses the ids of its sessions (episodes) and sandboxes. So it can safely repeat a call whose
  answer was lost: the same `PUT` returns the same session or sandbox, and a step with the same `turn` and `action`
  returns the same answer.
- **Tokens.** If tokens were created for the server, every request needs the header `Authorization: Bearer ek_...`.
  Otherwise the server answers only clients on its own machine.
- **Status 202** means that the session's reset, the episode's grader or the sandbox's start is still running: repeat
  the call.
- **Errors** have the content type `application/problem+json`: `type` is the code, `detail` says what is wrong and
  what to do, and `fields` contains the values that `detail` names. `retry` is true if the same call may succeed later;
  the header `Retry-After` then says after how many seconds.
- **Bytes** in JSON: the output of a program is a text, or `{"base64": "..."}` if it is not UTF-8. The input (`stdin`)
  of a program is always in base64.

Do not edit this page: `make docs` generates it from `envkit/http/`.
"""
SOCKET = """
## WebSocket

A WebSocket at `/v1/ws` carries many calls. Each call is a frame `{"id": ..., "method": ..., "params": {...}}`. The
server answers it with `{"id": ..., "result": ...}` or `{"id": ..., "error": ...}`; answers may come in another order.
`id` is a number or a text that the client chooses. A message contains one frame, or a list of up to 1,000 frames. If
the WebSocket closes, the server cancels the sandbox calls that have no parameter `key`, and completes all other calls.
To get the result of a completed call, repeat it over a new WebSocket, with the same `key` if it had one. `?` marks a
parameter that may be omitted. The methods:

| method | parameters |
|---|---|
"""
STREAMS = """
## Programs with streamed input, and connections

Each program with streamed input, and each connection to a server in a sandbox, uses a WebSocket of its own.

`/v1/sandboxes/NAME/program` runs a program. First send a text message with a JSON object that describes the program
(`argv`, `timeout_s`, and optionally `env`, `cwd`, `user`, and `terminal` as `[rows, columns]`). Then send the program's
input as binary messages, and the text message `{"eof": true}` at the end of the input. The text message
`{"rows": 30, "columns": 100}` resizes the terminal. The server sends the program's output as binary messages, whose
first byte is 1 for standard output and 2 for standard error. When the program has ended, the server sends the text
message `{"result": ...}`, which does not repeat the output, or `{"error": ...}`.

`/v1/sandboxes/NAME/connect?to=8000` connects to a server in the sandbox. `to` is a port, or the name of a Unix socket
in the sandbox's folder `$ENVKIT_SOCKETS`. Binary messages carry the bytes of the connection in both directions. Send an
empty binary message when you have sent everything. When the connection ends, the server sends the text message `{}`, or
`{"error": ...}` if it failed.
"""
EXAMPLES: Mapping[str, Any] = {
    "env_id": "FrozenLake-v0",
    "seed": 1,
    "turn": 0,
    "action": "<answer>down</answer>",
    "session_id": "a",
    "sandbox_id": "sandbox-1",
    "argv": ["echo", "hello"],
    "timeout_s": 10,
    "command": "cd /tmp && pwd",
}
"""Example values of required fields, by name."""
QUERIES = {"path": "notes.txt", "name": "main", "snapshot": "NAME"}
SKIPPED = {"/v1/sessions/{session_id}/grade"}
"""Paths without an example on the page, because a test runs every example: its session has no grader."""
UPLOAD = ("put", "/v1/sandboxes/{sandbox_id}/tree")
"""The upload of a folder. It follows the download, because its example uploads the file that the download writes."""
URL = "http://127.0.0.1:8000"


def page() -> str:
    """Return the text of the page."""
    app = create_app(cast(EnvHost, object()), pool=cast(SandboxPool, object()), folder_transport=tar_stream)
    document: dict[str, Any] = app.api().openapi()
    types = document["components"]["schemas"]
    text = HEAD
    for title, prefix in (("Environments", ("/v1/sessions", "/v1/envs")), ("Sandboxes", ("/v1/sandboxes", "/v1/snap"))):
        text += f"\n## {title}\n" + "".join(_operations(document, types, prefix))
    others = {path: item for path, item in document["paths"].items() if not path.startswith(("/v1/s", "/v1/envs"))}
    text += "\n## The server\n" + "".join(_operations({"paths": others}, types, ("",)))
    return text + SOCKET + "".join(_methods()) + STREAMS + "\n## Types\n" + "".join(_types(types))


def _operations(document: Mapping[str, Any], types: Mapping[str, Any], prefix: tuple[str, ...]) -> Iterator[str]:
    """Yield the text of each operation whose path starts with one of `prefix`; the examples work in this order."""
    paths = [(path, item) for path, item in document["paths"].items() if path.startswith(prefix)]
    found = [(verb, path, operation) for path, item in paths for verb, operation in sorted(item.items(), reverse=True)]
    made = [one for one in found if one[0] != "delete"]
    deleted = sorted((one for one in found if one[0] == "delete"), key=lambda one: -len(one[1]))
    for verb, path, operation in [*sorted(made, key=lambda one: one[:2] == UPLOAD), *deleted]:
        yield _operation(verb.upper(), path, operation, types)


def _operation(verb: str, path: str, operation: Mapping[str, Any], types: Mapping[str, Any]) -> str:
    text = f"\n### {verb} {path}\n\n{' '.join(operation['description'].split())}\n"
    parameters = [one for one in operation.get("parameters", ()) if one["in"] != "path"]
    if parameters:
        text += "\n" + "".join(f"- `{one['name']}` ({one['in']}): {one['description']}\n" for one in parameters)
    ((kind, body),) = (operation.get("requestBody", {}).get("content") or {"": {}}).items()
    reply_kind, reply = next(iter(operation["responses"]["200"]["content"].items()))
    body_name, reply_name = (_name(one.get("schema", {})) for one in (body, reply))
    text += f"\nBody: {body_name or kind or 'none'}. Reply: {reply_name or reply_kind}.\n"
    if path in SKIPPED:
        return text
    return text + f"\n```curl\n{_curl(verb, path, parameters, kind, body.get('schema', {}), types)}\n```\n"


def _curl(
    verb: str, path: str, parameters: Sequence[Any], kind: str, schema: Mapping[str, Any], types: Mapping[str, Any]
) -> str:
    for name, value in {**EXAMPLES, **QUERIES}.items():
        path = path.replace(f"{{{name}}}", str(value))
    queries = [
        f"{one['name']}={QUERIES[one['name']]}" for one in parameters if one["in"] == "query" and one["required"]
    ]
    words = ["curl", *(["-X", verb] if verb != "GET" else [])]
    words.append(f"'{URL}{path}?{'&'.join(queries)}'" if queries else f"{URL}{path}")
    if kind == "application/json":
        words += ["-d", f"'{json.dumps(_example(schema, types))}'"]
    elif kind:
        words += ["--data-binary", "@notes.tar" if "tar" in kind else "hello"]
    elif verb == "GET" and path.endswith("/tree"):
        words += ["-o", "notes.tar"]
    return " ".join(words)


def _example(schema: Mapping[str, Any], types: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        schema = types[schema["$ref"].rpartition("/")[2]]
    if schema.get("type") == "array":
        return [_example(schema["items"], types)]
    return {name: EXAMPLES[name] for name in schema.get("required", ())}


def _methods() -> Iterator[str]:
    for name, operation in METHODS.items():
        yield f"| `{name}` | {', '.join(_fields(operation.request)) or 'none'} |\n"


def _fields(request: type) -> Iterator[str]:
    for field in cast(Any, msgspec.inspect.type_info(request)).fields:
        yield f"`{field.encode_name}`" + ("" if field.required else "?")


def _types(types: Mapping[str, Any]) -> Iterator[str]:
    yield "\nThe types of bodies and replies. `?` marks a field that may be omitted.\n"
    for name, schema in sorted(types.items()):
        if "properties" in schema:
            yield f"\n### {name}\n\n{' '.join(schema.get('description', '').split())}\n\n| field | type |\n|---|---|\n"
            required = schema.get("required", ())
            for field, kind in schema["properties"].items():
                yield f"| `{field}`{'' if field in required else '?'} | {_name(kind)} |\n"
        elif "enum" in schema:
            yield f"\n### {name}\n\n{' '.join(schema.get('description', '').split())} One of: {_name(schema)}.\n"


def _name(schema: Mapping[str, Any]) -> str:
    """Return the type with this JSON schema as a short text; named types become links to their sections."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_name(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", ""))
    if kind == "array":
        return f"list of {_name(schema.get('items') or {}) or 'any'}"
    return {"object": "object", "string": "text", "null": "null"}.get(kind, kind) if "format" not in schema else ""
