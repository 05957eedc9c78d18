"""The described API: every call as an HTTP route, with an OpenAPI document at ``/openapi.json``.

The document's schemas are those of the very types that decode the messages, so FastAPI routes and describes here but
does not validate. This module is imported when the first of its routes is asked for: FastAPI takes longer to import
than a sandbox takes to start, and a server in a sandbox is only ever reached over its socket.
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
from envkit.http.sessions.counters import played_of

_V1 = f"/v{messages.PROTOCOL}"
_NOTHING = messages.NoBody()
_TASK = msgspec.json.Decoder(messages.TaskBody)
_STEP = msgspec.json.Decoder(messages.StepBody)
_REF = "#/components/schemas/{name}"
_NAME = msgspec.json.schema(messages.SessionId)  # of what is made; whatever is not so called is not there
_TOKENS = {"token": {"type": "http", "scheme": "bearer", "description": "Where the server has tokens: ek_..."}}
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


def describe(calls: Operations, slow_reset_s: float, sandboxes: SandboxPaths | None = None) -> FastAPI:
    """Return the application that answers every route.

    Args:
        calls: What the routes call.
        slow_reset_s: Seconds after which a reset, or the start of a sandbox, that goes on is answered with 202.
        sandboxes: What the routes about sandboxes call; None where there are none.
    """
    routes = _SessionRoutes(calls, slow_reset_s)
    api = FastAPI(
        title="envkit",
        version=__version__,
        docs_url=None,  # its page, and redoc's, run scripts of a third party in the origin of this server
        redoc_url=None,
        redirect_slashes=False,  # nobody's token is to be sent a second time, to who knows whom
        exception_handlers={EnvkitError: routes.failed, HTTPException: routes.lost, Exception: routes.failed},
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
        gives: str | None = None,
        busy: Any = None,
    ) -> None:
        replies: dict[int | str, Any] = {200: reply, 202: opening, 503: busy}
        responses: dict[int | str, dict[str, Any]] = {
            status: {"description": _first_line(type), "content": _content(schema_of[str(type)])}
            for status, type in replies.items()
            if type is not None
        }
        if gives is not None:
            content = {gives: {"schema": {"type": "string", "format": "binary"}}}
            responses[200] = {"description": "As it is.", "content": content}
        responses["default"] = {
            "description": _first_line(messages.Problem),
            "content": _content(schema_of[str(messages.Problem)], "application/problem+json"),
        }
        takes = {} if body is None else {"requestBody": {"required": True, "content": _content(schema_of[str(body)])}}
        extra = {**takes, **(more or {})}
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
    add("GET", "/metrics", routes.metrics, gives="text/plain")
    add("GET", _V1, routes.index, messages.IndexReply)
    api.add_api_route("/", routes.page, methods=["GET", "HEAD"], include_in_schema=False, response_class=Response)
    watched: dict[str, Any] = {
        f"{_V1}/health": routes.health,
        f"{_V1}/ready": routes.ready,
        "/metrics": routes.metrics,
        _V1: routes.index,
    }
    for path, route in watched.items():  # the document takes HEAD by itself
        api.add_api_route(path, route, methods=["HEAD"], include_in_schema=False, response_class=Response)
    if sandboxes is not None:
        sandbox_routes.add_routes(add, sandboxes, slow_reset_s)

    def document() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = get_openapi(title=api.title, version=api.version, routes=api.routes)
            api.openapi_schema["components"] = {"schemas": components, "securitySchemes": _TOKENS}
            api.openapi_schema["security"] = [{"token": []}, {}]
            for operations in api.openapi_schema["paths"].values():
                for verb, operation in operations.items():
                    for one in operation.get("parameters", ()):
                        if one["in"] == "path" and (verb == "put" or one["name"] == "name"):
                            one["schema"] = _NAME
        return api.openapi_schema

    api.openapi = document  # type: ignore[method-assign]
    return api


class _Route(APIRoute):
    """A route that takes the queries that the document has, and no others: one that is misspelt would be ignored."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("query_string") and scope["method"] in (self.methods or ()):
            parameters = (self.openapi_extra or {}).get("parameters", ())
            known = [one["name"] for one in parameters if one["in"] == "query"]
            for name in query_of(scope):
                if name not in known:
                    raise RequestError(f"there is no query {name[:100]!r} here{did_you_mean(name, known)}")
        await super().handle(scope, receive, send)


class _SessionRoutes:
    """One method a route: decode, one call, encode."""

    def __init__(self, calls: Operations, slow_reset_s: float) -> None:
        self._calls = calls
        self._slow_reset_s = slow_reset_s

    async def create(self, session_id: str, request: Request) -> Response:
        """Start a session: the task in, the first observation out. Repeating the call is safe.

        202 means that the reset takes its time: repeat the call until it gives the observation.
        """
        task = messages.read(await request.body(), _TASK)
        body = messages.CreateSessionBody(task.env_id, task.seed, task.options, session_id=messages.read_id(session_id))
        calls = self._by(request)
        with anyio.move_on_after(self._slow_reset_s):
            made = await calls.create(body)
            played_of(request.scope).envs[task.env_id] += 1
            return self._reply(request, made, session_id)
        session = await calls.session(messages.SessionBody(session_id))
        opening = messages.OpeningReply(turn=0, state=session.state)
        return _json(messages.write(opening), status=202, headers={"Retry-After": str(RETRY_AFTER_S)})

    async def step(self, session_id: str, request: Request) -> Response:
        """Play one move. Repeating the call with the same `turn` and `action` is safe."""
        step = messages.read(await request.body(), _STEP)
        return self._reply(request, await self._by(request).step(session_id, step), session_id)

    async def steps(self, request: Request) -> Response:
        """Play moves of many sessions: a list in, and a list of results or errors out, in the same order."""
        return _json(await self._by(request).steps(await request.body(), played_of(request.scope)))

    async def sessions(self, request: Request) -> Response:
        """Look at all sessions."""
        return self._reply(request, await self._by(request).list_sessions(_NOTHING))

    async def session(self, session_id: str, request: Request) -> Response:
        """Look at a session, without keeping it from expiring."""
        return self._reply(request, await self._by(request).session(messages.SessionBody(session_id)))

    async def delete(self, session_id: str, request: Request) -> Response:
        """End a session. Repeating the call is safe, as is ending one that does not exist."""
        return self._reply(request, await self._by(request).delete(messages.SessionBody(session_id)))

    async def envs(self, request: Request) -> Response:
        """List the environments that can be played."""
        return self._reply(request, await self._calls.list_envs(_NOTHING))

    async def health(self, request: Request) -> Response:
        """Say that the server is alive."""
        return self._reply(request, await self._calls.health(_NOTHING))

    async def ready(self) -> Response:
        """Say whether a session can be made now; if not, with status 503."""
        ready = await self._calls.ready(_NOTHING)
        return _json(messages.write(ready), status=200 if ready.ready else 503)

    async def metrics(self) -> Response:
        """Metrics in Prometheus's text format."""
        return Response(self._calls.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def index(self, request: Request) -> Response:
        """List the entry points of the API."""
        return self._reply(request, messages.IndexReply(__version__, messages.PROTOCOL, LINKS))

    async def page(self, request: Request) -> Response:
        """Return the status page."""
        return Response(page(await self._by(request).overview()), headers=HEADERS, media_type="text/html")

    async def failed(self, request: Request, error: Exception) -> Response:
        return _problem(self._by(request).problem(error, request.path_params.get("session_id")))

    async def lost(self, request: Request, error: Exception) -> Response:
        """Answer what no route takes, keeping the status that says why (404, 405)."""
        assert isinstance(error, HTTPException)
        kind = UnknownPathError if error.status_code == HTTPStatus.NOT_FOUND else RequestError
        what = kind(f"{request.method} {request.url.path}: {error.detail}")
        problem = msgspec.convert({**to_problem(what), "status": error.status_code}, messages.Problem)
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:  # the error knows of one route, of those with this path
            routes = [one for one in request.app.routes if one.matches(request.scope)[0] is not Match.NONE]
            headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods}))
        return _problem(problem, headers)

    def _by(self, request: Request) -> Operations:
        return self._calls.by(caller_of(request.scope))

    def _reply(self, request: Request, reply: object, session_id: str | None = None) -> Response:
        return _json(self._by(request).encode(reply, session_id))


def _json(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


def _problem(problem: messages.Problem, headers: dict[str, str] | None = None) -> Response:
    again = {"Retry-After": str(retry_after_s(problem))} if problem.retry else {}
    return Response(messages.write(problem), problem.status, {**(headers or {}), **again}, "application/problem+json")


def _content(schema: dict[str, Any], content_type: str = "application/json") -> dict[str, Any]:
    return {content_type: {"schema": schema}}


def _first_line(type: Any) -> str:
    return (type.__doc__ or "").partition("\n")[0] if hasattr(type, "__struct_fields__") else "One for each step."
