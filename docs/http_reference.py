"""Builds the page about the HTTP API and the WebSocket from the messages and routes that the server uses."""

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

Everything that `envkit.make(url=...)` and `envkit.open_sandbox(url=...)` do goes through this API, so a client in any
language can do the same. The five calls to type first:

    curl http://127.0.0.1:8000/v1/envs                                                          # what can be played
    curl -X PUT http://127.0.0.1:8000/v1/sessions/a -d '{"env_id": "FrozenLake-v0", "seed": 1}' # start an episode
    curl http://127.0.0.1:8000/v1/sessions/a -X DELETE                                          # end it
    curl -X PUT http://127.0.0.1:8000/v1/sandboxes/sandbox-1 -d '{}'                                  # start a sandbox
    curl http://127.0.0.1:8000/openapi.json                                                     # this API as OpenAPI

[play.mjs](../examples/play.mjs) plays an episode in 60 lines of JavaScript.

- **Ids.** The caller chooses the ids of sessions and sandboxes, so every call can be repeated: the same `PUT` returns
  the same session or sandbox, and the same step (`turn` and `action`) returns the same answer.
- **Tokens.** If the server has tokens, send `Authorization: Bearer ek_...`. Without tokens, the server answers
  only clients on its own machine.
- **202** means that the reset or start is still running: repeat the call.
- **Errors** have the content type `application/problem+json`: `type` is the code, `detail` says what is wrong and
  what to do, and `fields` contains the values that `detail` names. `retry` says whether a repeated call may succeed.
  The header `Retry-After` says after how many seconds.
- **Bytes** in JSON (output of programs) are a text, or `{"base64": "..."}` if they are not UTF-8. Input is always
  base64.
- **Numbers** that JSON cannot express are the texts `nan`, `inf` and `-inf`.

Written from `envkit/http/` by `make docs`; do not edit.
"""
SOCKET = """
## WebSocket

`/v1/ws` carries many calls, each in a frame `{"id": ..., "method": ..., "params": {...}}`. The server answers each
with `{"id": ..., "result": ...}` or `{"id": ..., "error": ...}`, in any order. A message contains one frame, or a
list of up to 1,000 frames. `id` is a number or a text. If the WebSocket closes, a call about a sandbox is cancelled
if the call has no `key`. All other calls continue. To get the result of a call, repeat it over a new WebSocket, with
the same `key` if it has one. The methods:

| method | parameters |
|---|---|
"""
STREAMS = """
## Programs with streamed input, and connections

Each program and each connection uses a separate WebSocket.

`/v1/sandboxes/NAME/program`: first send the program as a text message (`argv`, `timeout_s`, and optionally `env`,
`cwd`, `user`, and `terminal` as `[rows, columns]`). Then send its input as binary messages. Send
`{"eof": true}` as text at the end of the input, and `{"rows": 30, "columns": 100}` to resize the terminal. The server
sends output as binary messages, whose first byte is 1 for standard output and 2 for standard error. At the end it
sends `{"result": ...}` (without output) or `{"error": ...}` as text.

`/v1/sandboxes/NAME/connect?to=8000`: `to` is a port in the sandbox, or the name of a socket in its folder
`$ENVKIT_SOCKETS`. Binary messages carry the bytes of the connection in both directions. Send an empty binary message
when you have sent everything. At the end the server sends `{}` or `{"error": ...}` as text.
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
SKIPPED = {"/v1/events"}
"""Paths whose reply never ends. They get no example, because the example would never end either."""
UPLOAD = ("put", "/v1/sandboxes/{sandbox_id}/tree")
"""The upload of a folder. Its example uploads `notes.tar`, which the example of the download has written."""
URL = "http://127.0.0.1:8000"


def page() -> str:
    """Return the page."""
    app = create_app(cast(EnvHost, object()), pool=cast(SandboxPool, object()), folder_transport=tar_stream)
    document: dict[str, Any] = app.document()
    types = document["components"]["schemas"]
    text = HEAD
    for title, prefix in (("Environments", ("/v1/sessions", "/v1/envs")), ("Sandboxes", ("/v1/sandboxes", "/v1/snap"))):
        text += f"\n## {title}\n" + "".join(_operations(document, types, prefix))
    others = {path: item for path, item in document["paths"].items() if not path.startswith(("/v1/s", "/v1/envs"))}
    text += "\n## The server\n" + "".join(_operations({"paths": others}, types, ("",)))
    return text + SOCKET + "".join(_methods()) + STREAMS + "\n## Types\n" + "".join(_types(types))


def _operations(document: Mapping[str, Any], types: Mapping[str, Any], prefix: tuple[str, ...]) -> Iterator[str]:
    """Yield the operations whose paths start with one of `prefix`, in an order in which their examples work."""
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
    yield "\n`?` marks a field that may be omitted.\n"
    for name, schema in sorted(types.items()):
        if "properties" in schema:
            yield f"\n### {name}\n\n{' '.join(schema.get('description', '').split())}\n\n| field | type |\n|---|---|\n"
            required = schema.get("required", ())
            for field, kind in schema["properties"].items():
                yield f"| `{field}`{'' if field in required else '?'} | {_name(kind)} |\n"


def _name(schema: Mapping[str, Any]) -> str:
    """Return a short text for a type."""
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
