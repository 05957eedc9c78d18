"""The HTTP routes of all operations, with an OpenAPI document at ``/openapi.json``.

The schemas in the document are generated from the types that decode the messages. FastAPI therefore only routes
requests and does not validate them. This module is imported on first use, because importing FastAPI takes longer than
starting a sandbox, and the server inside a sandbox needs only the WebSocket.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import anyio
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from envkit import __version__
from envkit.errors import EnvkitError, RequestError, UnknownPathError, did_you_mean, to_problem
from envkit.http.api.operations import Operations
from envkit.http.api.status_page import HEADERS, LINKS, page
from envkit.http.auth.caller import caller_of
from envkit.http.protocol import messages
from envkit.http.protocol.asgi import RETRY_AFTER_S, Receive, Scope, Send, retry_after_s
from envkit.http.sandboxes import routes as sandbox_routes
from envkit.http.sandboxes.http import SandboxPaths, query_of
from envkit.http.sessions.counters import step_metrics_of

_V1 = f"/v{messages.PROTOCOL}"
_NOTHING = messages.NoBody()
_TASK = msgspec.json.Decoder(messages.TaskBody)
_STEP = msgspec.json.Decoder(messages.StepBody)
_REF = "#/components/schemas/{name}"
_NEW_ID = msgspec.json.schema(messages.SessionId)
_TOKENS = {"token": {"type": "http", "scheme": "bearer", "description": "Token (ek_...), if the server needs one."}}
_TYPES = (
    messages.TaskBody,
    messages.StepBody,
    list[messages.SessionStepBody],
    messages.ResetReply,
    messages.OpeningReply,
    messages.StepReply,
    list[messages.Outcome],
    messages.SessionReply,
    messages.SessionsReply,
    messages.EnvsReply,
    messages.HealthReply,
    messages.IndexReply,
    messages.ReadyReply,
    messages.DoneReply,
    messages.Problem,
)


def describe(operations: Operations, slow_reset_s: float, sandboxes: SandboxPaths | None = None) -> FastAPI:
    """Return the FastAPI application that answers all HTTP routes.

    Args:
        operations: The operations on sessions that the routes call.
        slow_reset_s: Seconds after which a request is answered with 202 if its reset, or its start of a sandbox, is
            still running.
        sandboxes: Answers requests about sandboxes; None: the server has no sandbox routes.
    """
    routes = _SessionRoutes(operations, slow_reset_s)
    api = FastAPI(
        title="envkit",
        version=__version__,
        # Swagger UI and ReDoc are off: they load third-party scripts, which could call this server like its own pages.
        docs_url=None,
        redoc_url=None,
        # A client that follows a redirect could send its token to another server.
        redirect_slashes=False,
        exception_handlers={EnvkitError: routes.failed, HTTPException: routes.unrouted, Exception: routes.failed},
    )
    api.router.route_class = _Route
    types = _TYPES if sandboxes is None else (*_TYPES, *sandbox_routes.TYPES)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(map(str, types), schemas, strict=True))

    def add(
        verb: str,
        path: str,
        route: Any,
        reply: Any = None,
        body: Any = None,
        opening: Any = None,
        more: dict[str, Any] | None = None,
        content_type: str | None = None,
        busy: Any = None,
    ) -> None:
        replies: dict[int | str, Any] = {200: reply, 202: opening, 503: busy}
        responses: dict[int | str, dict[str, Any]] = {
            status: {"description": _first_line(type), "content": _content(schema_of[str(type)])}
            for status, type in replies.items()
            if type is not None
        }
        if content_type is not None:
            content = {content_type: {"schema": {"type": "string", "format": "binary"}}}
            responses[200] = {"description": "Raw content.", "content": content}
        responses["default"] = {
            "description": _first_line(messages.Problem),
            "content": _content(schema_of[str(messages.Problem)], "application/problem+json"),
        }
        request = {} if body is None else {"requestBody": {"required": True, "content": _content(schema_of[str(body)])}}
        extra = {**request, **(more or {})}
        api.add_api_route(
            path, route, methods=[verb], responses=responses, openapi_extra=extra, response_class=Response
        )

    session = f"{_V1}/sessions/{{session_id}}"
    add("PUT", session, routes.create, messages.ResetReply, messages.TaskBody, messages.OpeningReply)
    add("POST", f"{session}/step", routes.step, messages.StepReply, messages.StepBody)
    add("POST", f"{_V1}/sessions:step", routes.steps, list[messages.Outcome], list[messages.SessionStepBody])
    add("GET", f"{_V1}/sessions", routes.sessions, messages.SessionsReply)
    add("GET", session, routes.session, messages.SessionReply)
    add("DELETE", session, routes.delete, messages.DoneReply)
    add("GET", f"{_V1}/envs", routes.envs, messages.EnvsReply)
    add("GET", f"{_V1}/health", routes.health, messages.HealthReply)
    add("GET", f"{_V1}/ready", routes.ready, messages.ReadyReply, busy=messages.ReadyReply)
    add("GET", "/metrics", routes.metrics, content_type="text/plain")
    add("GET", _V1, routes.index, messages.IndexReply)
    api.add_api_route("/", routes.page, methods=["GET", "HEAD"], include_in_schema=False, response_class=Response)
    monitored: dict[str, Any] = {
        f"{_V1}/health": routes.health,
        f"{_V1}/ready": routes.ready,
        "/metrics": routes.metrics,
        _V1: routes.index,
    }
    # Monitoring tools also send HEAD requests. The OpenAPI document lists only the GET requests.
    for path, route in monitored.items():
        api.add_api_route(path, route, methods=["HEAD"], include_in_schema=False, response_class=Response)
    if sandboxes is not None:
        sandbox_routes.add_routes(add, sandboxes, slow_reset_s)

    def document() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = get_openapi(title=api.title, version=api.version, routes=api.routes)
            api.openapi_schema["components"] = {"schemas": components, "securitySchemes": _TOKENS}
            api.openapi_schema["security"] = [{"token": []}, {}]
            for path_item in api.openapi_schema["paths"].values():
                for verb, operation in path_item.items():
                    for parameter in operation.get("parameters", ()):
                        if parameter["in"] == "path" and (verb == "put" or parameter["name"] == "name"):
                            parameter["schema"] = _NEW_ID
        return api.openapi_schema

    api.openapi = document  # type: ignore[method-assign]
    return api


class _Route(APIRoute):
    """A route that rejects query parameters that the OpenAPI document does not list, such as misspelt names."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("query_string") and scope["method"] in (self.methods or ()):
            parameters = (self.openapi_extra or {}).get("parameters", ())
            known = [one["name"] for one in parameters if one["in"] == "query"]
            for name in query_of(scope):
                if name not in known:
                    raise RequestError(f"unknown query parameter {name[:100]!r}{did_you_mean(name, known)}")
        await super().handle(scope, receive, send)


class _SessionRoutes:
    """The routes of sessions. Each method decodes the request, calls one operation, and encodes the reply."""

    def __init__(self, operations: Operations, slow_reset_s: float) -> None:
        self._operations = operations
        self._slow_reset_s = slow_reset_s

    async def create(self, session_id: str, request: Request) -> Response:
        """Create a session for a task and return the first observation. The call is safe to repeat.

        Status 202 means that the environment's reset is still running. Repeat the call until it returns the
        observation.
        """
        task = messages.read(await request.body(), _TASK)
        body = messages.CreateSessionBody(task.env_id, task.seed, task.options, session_id=messages.read_id(session_id))
        operations = self._by(request)
        with anyio.move_on_after(self._slow_reset_s):
            created = await operations.create(body)
            step_metrics_of(request.scope).envs[task.env_id] += 1
            return self._reply(request, created, session_id)
        session = await operations.session(messages.SessionBody(session_id))
        opening = messages.OpeningReply(turn=0, state=session.state)
        return _json(messages.write(opening), status=202, headers={"Retry-After": str(RETRY_AFTER_S)})

    async def step(self, session_id: str, request: Request) -> Response:
        """Play one step. The call is safe to repeat with the same `turn` and `action`."""
        step = messages.read(await request.body(), _STEP)
        return self._reply(request, await self._by(request).step(session_id, step), session_id)

    async def steps(self, request: Request) -> Response:
        """Play steps of many sessions. Return a list with the result or error of each step, in the same order."""
        return _json(await self._by(request).steps(await request.body(), step_metrics_of(request.scope)))

    async def sessions(self, request: Request) -> Response:
        """List all sessions."""
        return self._reply(request, await self._by(request).list_sessions(_NOTHING))

    async def session(self, session_id: str, request: Request) -> Response:
        """Return the status of a session. The call does not delay the session's expiry."""
        return self._reply(request, await self._by(request).session(messages.SessionBody(session_id)))

    async def delete(self, session_id: str, request: Request) -> Response:
        """Delete a session. The call is safe to repeat, and succeeds if the session does not exist."""
        return self._reply(request, await self._by(request).delete(messages.SessionBody(session_id)))

    async def envs(self, request: Request) -> Response:
        """List the available environments."""
        return self._reply(request, await self._operations.list_envs(_NOTHING))

    async def health(self, request: Request) -> Response:
        """Report that the server is alive."""
        return self._reply(request, await self._operations.health(_NOTHING))

    async def ready(self) -> Response:
        """Report whether a session can be created now; the status is 503 if not."""
        ready = await self._operations.ready(_NOTHING)
        return _json(messages.write(ready), status=200 if ready.ready else 503)

    async def metrics(self) -> Response:
        """Return metrics in Prometheus text format."""
        return Response(self._operations.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def index(self, request: Request) -> Response:
        """List the entry points of the API."""
        return self._reply(request, messages.IndexReply(__version__, messages.PROTOCOL, LINKS))

    async def page(self, request: Request) -> Response:
        """Return the status page."""
        return Response(page(await self._by(request).overview()), headers=HEADERS, media_type="text/html")

    async def failed(self, request: Request, error: Exception) -> Response:
        return _problem(self._by(request).problem(error, request.path_params.get("session_id")))

    async def unrouted(self, request: Request, error: Exception) -> Response:
        """Answer a request whose path (404) or method (405) matches no route."""
        assert isinstance(error, HTTPException)
        kind = UnknownPathError if error.status_code == HTTPStatus.NOT_FOUND else RequestError
        reason = kind(f"{request.method} {request.url.path}: {error.detail}")
        problem = msgspec.convert({**to_problem(reason), "status": error.status_code}, messages.Problem)
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            # List the methods of all routes of this path. Starlette's error lists those of one route only.
            routes = [one for one in request.app.routes if one.matches(request.scope)[0] is not Match.NONE]
            headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods}))
        return _problem(problem, headers)

    def _by(self, request: Request) -> Operations:
        return self._operations.by(caller_of(request.scope))

    def _reply(self, request: Request, reply: object, session_id: str | None = None) -> Response:
        return _json(self._by(request).encode(reply, session_id))


def _json(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


def _problem(problem: messages.Problem, headers: dict[str, str] | None = None) -> Response:
    retry_after = {"Retry-After": str(retry_after_s(problem))} if problem.retry else {}
    return Response(
        messages.write(problem), problem.status, {**(headers or {}), **retry_after}, "application/problem+json"
    )


def _content(schema: dict[str, Any], content_type: str = "application/json") -> dict[str, Any]:
    return {content_type: {"schema": schema}}


def _first_line(type: Any) -> str:
    return (type.__doc__ or "").partition("\n")[0] if hasattr(type, "__struct_fields__") else "One for each step."
