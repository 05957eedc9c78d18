"""The HTTP routes of all operations, with an OpenAPI document at ``/openapi.json``.

Routes and document are made from the table in `envkit.http.protocol.operations`. FastAPI only routes requests and
renders the document; it does not validate requests. This module is imported on first use, because importing FastAPI
takes longer than starting a sandbox, and the server inside a sandbox needs only the WebSocket.
"""

from __future__ import annotations

import inspect
from http import HTTPStatus
from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from envkit import __version__
from envkit.errors import RequestError, UnknownPathError, to_problem
from envkit.http.api.dispatcher import Dispatcher
from envkit.http.protocol import messages
from envkit.http.protocol.operations import (
    HEALTH,
    INDEX,
    JSON,
    KEY_HEADER,
    METRICS_TEXT,
    OPERATIONS,
    PAGE,
    READY,
    Operation,
)

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


def describe(dispatcher: Dispatcher) -> FastAPI:
    """Return a FastAPI application with all HTTP routes. Its document lists only operations that have a handler."""
    api = FastAPI(
        title="envkit",
        version=__version__,
        # Swagger UI and ReDoc are off: they load third-party scripts, which could then call this server.
        docs_url=None,
        redoc_url=None,
        # Never redirect: a client that follows a redirect could send its token to another server.
        redirect_slashes=False,
        exception_handlers={HTTPException: _unrouted},
    )
    operations = [one for one in OPERATIONS if one.path and one.verb != "WEBSOCKET"]
    described = [one for one in operations if dispatcher.handler(one) is not None]
    types = {str(kind): kind for one in described for kind in (one.json_body, one.reply, *one.replies.values())}
    types = {name: kind for name, kind in types.items() if kind not in (None, str, bytes)}
    types[str(messages.Problem)] = messages.Problem
    schemas, components = msgspec.json.schema_components(types.values(), ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    for operation in operations:
        _add(api, dispatcher, operation, schema_of)

    def document() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = get_openapi(title=api.title, version=api.version, routes=api.routes)
            api.openapi_schema["components"] = {"schemas": components, "securitySchemes": _TOKENS}
            api.openapi_schema["security"] = [{"token": []}, {}]
        return api.openapi_schema

    api.openapi = document  # type: ignore[method-assign]
    return api


def _add(api: FastAPI, dispatcher: Dispatcher, operation: Operation[Any, Any], schema_of: dict[str, Any]) -> None:
    """Add the HTTP route of an operation to `api`. `schema_of` contains the JSON schema of each message type."""
    handler = dispatcher.handler(operation)
    is_described = handler is not None and operation is not PAGE

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await dispatcher.respond(operation, scope["path_params"], scope, receive, send)

    def add(verb: str, **description: Any) -> None:
        api.add_api_route(operation.path, _unused, methods=[verb], response_class=Response, **description)
        cast(APIRoute, api.routes[-1]).app = respond

    if is_described:
        replies = {200: operation.reply, **operation.replies}
        responses: dict[int | str, dict[str, Any]] = {
            status: {"description": _first_line(kind), "content": _content(schema_of[str(kind)])}
            for status, kind in replies.items()
            if str(kind) in schema_of
        }
        if operation.gives != JSON:
            responses[200] = {"description": "Raw content.", "content": _binary(operation.gives)}
        responses["default"] = {
            "description": _first_line(messages.Problem),
            "content": _content(schema_of[str(messages.Problem)], "application/problem+json"),
        }
        add(
            operation.verb,
            name=operation.title or operation.name.removeprefix("sandbox."),
            description=inspect.getdoc(handler) or "",
            responses=responses,
            openapi_extra=_request(operation, schema_of),
        )
    else:
        add(operation.verb, include_in_schema=False)
    if operation in _MONITORED or operation is PAGE:
        add("HEAD", include_in_schema=False)


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


async def _unused() -> None:
    """FastAPI needs a function for each route. It is never called, because `_add` replaces the route's application."""


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
