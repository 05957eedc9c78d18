"""The HTTP routes of all operations, with an OpenAPI document at ``/openapi.json``.

Routes and document are made from the table in `envkit.http.protocol.operations`. This module is imported on first use,
because the server inside a sandbox needs only the WebSocket.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from envkit import __version__
from envkit.errors import RequestError, UnknownPathError, to_problem
from envkit.http.api.dispatcher import Dispatcher
from envkit.http.protocol import messages
from envkit.http.protocol.operations import HEALTH, INDEX, JSON, KEY_HEADER, METRICS_TEXT, OPERATIONS, READY, Operation

_REF = "#/components/schemas/{name}"
_TOKENS = {"token": {"type": "http", "scheme": "bearer", "description": "Token (ek_...), if the server needs one."}}
_MONITORED = (HEALTH, READY, METRICS_TEXT, INDEX)
"""Operations that also answer HEAD requests, which monitoring tools send. The document lists them only with GET."""

_KEY = {
    "in": "header",
    "name": KEY_HEADER,
    "description": "Makes the call safe to repeat: another call with the same key and body gets the same answer.",
    "schema": {"type": "string"},
}
_ROUTED = [one for one in OPERATIONS if one.path and one.verb != "WEBSOCKET"]


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """The ASGI application that answers the requests for one operation."""

    dispatcher: Dispatcher
    operation: Operation[Any, Any]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.dispatcher.respond(self.operation, scope["path_params"], scope, receive, send)


def routes(dispatcher: Dispatcher) -> Starlette:
    """Return an application with all HTTP routes."""

    async def openapi(request: Request) -> Response:
        return JSONResponse(document(dispatcher))

    found = [Route("/openapi.json", openapi)]
    for operation in _ROUTED:
        found.append(Route(operation.path, _Endpoint(dispatcher, operation)))
        found[-1].methods = {operation.verb, "HEAD"} if operation in _MONITORED else {operation.verb}
    api = Starlette(routes=found, exception_handlers={HTTPException: _unrouted})
    # Never redirect: a client that follows a redirect could send its token to another server.
    api.router.redirect_slashes = False
    return api


def document(dispatcher: Dispatcher) -> dict[str, Any]:
    """Return the OpenAPI document, which lists only operations that have a handler."""
    described = [one for one in _ROUTED if dispatcher.handler(one) is not None]
    types = {str(kind): kind for one in described for kind in (one.json_body, one.reply, *one.replies.values())}
    types = {name: kind for name, kind in types.items() if kind not in (None, str, bytes)}
    types[str(messages.Problem)] = messages.Problem
    schemas, components = msgspec.json.schema_components(types.values(), ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in described:
        name = operation.title or operation.name.removeprefix("sandbox.")
        paths.setdefault(operation.path, {})[operation.verb.lower()] = {
            "summary": name.replace("_", " ").title(),
            "description": inspect.getdoc(dispatcher.handler(operation)) or "",
            "operationId": re.sub(r"\W", "_", f"{name}{operation.path}_{operation.verb.lower()}"),
            "responses": _responses(operation, schema_of),
            **_request(operation, schema_of),
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "envkit", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _TOKENS},
        "security": [{"token": []}, {}],
    }


def _responses(operation: Operation[Any, Any], schema_of: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of an operation's replies. `schema_of` has the JSON schema of each type."""
    replies = {200: operation.reply, **operation.replies}
    responses = {
        str(status): {"description": _first_line(kind), "content": _content(schema_of[str(kind)])}
        for status, kind in replies.items()
        if str(kind) in schema_of
    }
    if operation.gives != JSON:
        responses["200"] = {"description": "Raw content.", "content": _binary(operation.gives)}
    problem = _content(schema_of[str(messages.Problem)], "application/problem+json")
    return {**responses, "default": {"description": _first_line(messages.Problem), "content": problem}}


def _request(operation: Operation[Any, Any], schema_of: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of an operation's request: its parameters and its body."""
    parameters = [
        {
            "in": "query" if field.name in operation.queries else "path",
            "name": field.name,
            "required": field.required or field.name not in operation.queries,
            "schema": (schema := msgspec.json.schema(field.type)),
            "description": schema.pop("description", ""),
        }
        for field in msgspec.structs.fields(operation.parameters)
    ]
    request: dict[str, Any] = {"parameters": [*parameters, *([_KEY] if operation.has_key else [])]}
    if operation.takes != JSON:
        request["requestBody"] = {"required": True, "content": _binary(operation.takes)}
    elif operation.json_body is not None:
        request["requestBody"] = {"required": True, "content": _content(schema_of[str(operation.json_body)])}
    return request


async def _unrouted(request: Request, error: Exception) -> Response:
    """Answer a request whose path matches no route (status 404), or whose path does not allow its method (405)."""
    assert isinstance(error, HTTPException)
    kind = UnknownPathError if error.status_code == HTTPStatus.NOT_FOUND else RequestError
    reason = to_problem(kind(f"{request.method} {request.url.path}: {error.detail}"))
    problem = msgspec.convert({**reason, "status": error.status_code}, messages.Problem)
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # List the methods of all routes of this path. The header of Starlette's error lists those of only one route.
        routes = [one for one in request.app.routes if one.matches(request.scope)[0] is not Match.NONE]
        headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods}))
    return Response(messages.write(problem), error.status_code, headers, "application/problem+json")


def _content(schema: dict[str, Any], content_type: str = JSON) -> dict[str, Any]:
    return {content_type: {"schema": schema}}


def _binary(content_type: str) -> dict[str, Any]:
    return _content({"type": "string", "format": "binary"}, content_type)


def _first_line(kind: Any) -> str:
    return (kind.__doc__ or "").partition("\n")[0] if hasattr(kind, "__struct_fields__") else "One for each call."
