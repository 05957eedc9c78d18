"""The table of operations: what a client can ask of a server, over HTTP, over the WebSocket, or over both.

From this table, the server makes its WebSocket methods, its HTTP routes, its checks of token scopes and the OpenAPI
document. The clients use the table to make calls, and ``docs/http-api.md`` lists it. A handler on the server is bound
to its operation with `envkit.http.protocol.asgi.handles`.

Over the WebSocket, a request is sent as JSON, as the parameters of a frame. Over HTTP, its fields are divided:

* Fields named in the path of the route are part of the path.
* The field `key` is the header ``Idempotency-Key``.
* The fields of the base class of the request's class are the JSON body.
* All other fields are query parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from envkit.http.auth.caller import ADMIN, METRICS, NODE, PLAY, SANDBOX
from envkit.http.protocol import file_messages as files
from envkit.http.protocol import messages
from envkit.http.protocol import node_messages as nodes
from envkit.http.protocol import sandbox_messages as wire

JSON, BINARY, TAR = "application/json", "application/octet-stream", "application/x-tar"
TEXT, HTML = "text/plain", "text/html"

KEY_HEADER = "Idempotency-Key"

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R")

_V1 = f"/v{messages.PROTOCOL}"
_SESSIONS = f"{_V1}/sessions"
_SESSION = f"{_SESSIONS}/{{session_id}}"
_SANDBOXES = f"{_V1}/sandboxes"
_ONE = f"{_SANDBOXES}/{{sandbox_id}}"
_SNAPSHOTS = f"{_V1}/snapshots"
_NODES = f"{_V1}/nodes"


@dataclass(frozen=True, eq=False)
class Operation(Generic[Q, R]):
    """One operation.

    Attributes:
        name: Name of the operation. A WebSocket frame contains this name in its field `method`.
        request: Type of the request.
        reply: Type of the reply.
        scope: Token scope that a caller needs; "" if any token is enough, None if no token is needed.
        route: Verb and path of its HTTP route, with the names of request fields in braces; "" if it has none.
        replies: Types of the replies with another status than 200, by status. If 202 is among them, the server answers
            a slow HTTP request with that reply, and the client repeats the request.
        runs_program: Whether the operation runs a program, whose input and output may be large. Without a `key`, the
            program is killed if the caller disconnects.
        body: Type of the JSON body, if it is not the base class of the request's class.
        takes: Content type of the request's body.
        gives: Content type of the reply.
        title: Name in the OpenAPI document, if it is not the last part of `name`.
    """

    name: str
    request: type[Q]
    reply: type[R]
    scope: str | None
    route: str = ""
    replies: Mapping[int, Any] = field(default_factory=dict)
    runs_program: bool = False
    body: Any = None
    takes: str = JSON
    gives: str = JSON
    title: str = ""

    @cached_property
    def verb(self) -> str:
        return self.route.partition(" ")[0]

    @cached_property
    def path(self) -> str:
        return self.route.partition(" ")[2]

    @cached_property
    def is_raw(self) -> bool:
        """Whether the body or the reply is not one JSON object. If so, the handler gets the whole HTTP request."""
        return self.body is not None or (self.takes, self.gives) != (JSON, JSON)

    @cached_property
    def json_body(self) -> Any:
        """Type of the JSON body of an HTTP request; None if the request has no JSON body."""
        base = self.request.__base__
        return self.body or (None if base is msgspec.Struct else base)

    @cached_property
    def parameters(self) -> type[msgspec.Struct]:
        """Type of the parameters in the path and the query of an HTTP request."""
        body = () if self.body or self.json_body is None else self.json_body.__struct_fields__
        fields = [one for one in msgspec.structs.fields(self.request) if one.name not in (*body, "key")]
        types = [(one.name, one.type, msgspec.field(default=one.default)) for one in fields]
        return msgspec.defstruct(f"{self.request.__name__}Parameters", types)

    @cached_property
    def queries(self) -> list[str]:
        """Names of the query parameters."""
        return [name for name in self.parameters.__struct_fields__ if f"{{{name}}}" not in self.path]

    @cached_property
    def has_key(self) -> bool:
        """Whether a request may have an idempotency key."""
        return "key" in self.request.__struct_fields__

    @cached_property
    def body_decoder(self) -> msgspec.json.Decoder[Any]:
        return msgspec.json.Decoder(self.json_body)

    @cached_property
    def request_decoder(self) -> msgspec.json.Decoder[Q]:
        return msgspec.json.Decoder(self.request)

    @cached_property
    def reply_decoder(self) -> msgspec.json.Decoder[R]:
        return msgspec.json.Decoder(self.reply)

    def target(self, request: Q) -> str:
        """Return the path and query of the HTTP request, in which bytes that are not UTF-8 are percent-encoded."""
        values = {name: getattr(request, name) for name in self.parameters.__struct_fields__}
        path = self.path.format(**{name: quote(values[name], safe="") for name in values.keys() - set(self.queries)})
        query = {name: values[name] for name in self.queries if values[name] != ""}
        return f"{path}?{urlencode(query, quote_via=quote, errors='surrogateescape')}" if query else path

    def content(self, request: Q) -> bytes:
        """Return the JSON body of the HTTP request."""
        fields = {name: getattr(request, name) for name in self.json_body.__struct_fields__}
        return messages.write(self.json_body(**fields))


CREATE = Operation(
    "create",
    messages.CreateSessionBody,
    messages.ResetReply,
    PLAY,
    f"PUT {_SESSION}",
    replies={202: messages.OpeningReply},
)
STEP = Operation("step", messages.SessionStepBody, messages.StepReply, PLAY, f"POST {_SESSION}/step")
GRADE = Operation(
    "grade",
    messages.SessionBody,
    messages.GradeReply,
    PLAY,
    f"POST {_SESSION}/grade",
    replies={202: messages.GradingReply},
)
DELETE = Operation("delete", messages.SessionBody, messages.DoneReply, PLAY, f"DELETE {_SESSION}")
SESSION = Operation("session", messages.SessionBody, messages.SessionReply, PLAY, f"GET {_SESSION}")
SESSIONS = Operation("sessions", messages.NoBody, messages.SessionsReply, PLAY, f"GET {_SESSIONS}")
STEPS = Operation(
    "steps",
    messages.NoBody,
    list[messages.Outcome],
    PLAY,
    f"POST {_SESSIONS}:step",
    body=list[messages.SessionStepBody],
)
ENVS = Operation("envs", messages.NoBody, messages.EnvsReply, PLAY, f"GET {_V1}/envs")
HEALTH = Operation("health", messages.NoBody, messages.HealthReply, None, f"GET {_V1}/health")
READY = Operation(
    "ready", messages.NoBody, messages.ReadyReply, None, f"GET {_V1}/ready", replies={503: messages.ReadyReply}
)
METRICS_TEXT = Operation("metrics", messages.NoBody, str, METRICS, "GET /metrics", gives=TEXT)
INDEX = Operation("index", messages.NoBody, messages.IndexReply, "", f"GET {_V1}")
PAGE = Operation("page", messages.NoBody, str, "", "GET /", gives=HTML)

CREATE_SANDBOX = Operation(
    "sandbox.create", wire.CreateFrame, wire.SandboxReply, SANDBOX, f"PUT {_ONE}", replies={202: wire.StartingReply}
)
VIEW = Operation("sandbox.view", wire.SandboxFrame, wire.SandboxReply, SANDBOX, f"GET {_ONE}")
VIEWS = Operation("sandbox.list", messages.NoBody, wire.SandboxesReply, SANDBOX, f"GET {_SANDBOXES}", title="views")
EXEC = Operation("sandbox.exec", wire.ExecFrame, wire.ExecReply, SANDBOX, f"POST {_ONE}/exec", runs_program=True)
SHELL = Operation(
    "sandbox.shell", wire.ShellFrame, wire.ExecReply, SANDBOX, f"POST {_ONE}/shells/{{name}}", runs_program=True
)
CLOSE_SHELL = Operation(
    "sandbox.close_shell", wire.CloseShellFrame, messages.DoneReply, SANDBOX, f"DELETE {_ONE}/shells/{{name}}"
)
READ = Operation("sandbox.read", files.ReadFrame, files.FileReply, SANDBOX)
WRITE = Operation("sandbox.write", files.WriteFrame, messages.DoneReply, SANDBOX)
READ_FILE = Operation(
    "sandbox.read_file", files.ReadFile, bytes, SANDBOX, f"GET {_ONE}/files", gives=BINARY, title="read"
)
WRITE_FILE = Operation(
    "sandbox.write_file", files.WriteFile, messages.DoneReply, SANDBOX, f"PUT {_ONE}/files", takes=BINARY, title="write"
)
DOWNLOAD_TREE = Operation("sandbox.download_tree", files.DownloadTree, bytes, SANDBOX, f"GET {_ONE}/tree", gives=TAR)
UPLOAD_TREE = Operation(
    "sandbox.upload_tree", files.UploadTree, messages.DoneReply, SANDBOX, f"PUT {_ONE}/tree", takes=TAR
)
SNAPSHOT = Operation("sandbox.snapshot", wire.SnapshotFrame, wire.SnapshotReply, SANDBOX, f"POST {_ONE}/snapshot")
LIST_SNAPSHOTS = Operation("sandbox.snapshots", messages.NoBody, wire.SnapshotsReply, SANDBOX, f"GET {_SNAPSHOTS}")
REMOVE_SNAPSHOT = Operation(
    "sandbox.remove_snapshot", wire.KeptFrame, messages.DoneReply, SANDBOX, f"DELETE {_SNAPSHOTS}/{{snapshot}}"
)
PROBE = Operation("sandbox.probe", wire.ProbeFrame, wire.ProbeReply, SANDBOX)
WAIT = Operation("sandbox.wait", wire.SandboxFrame, wire.WaitReply, SANDBOX)
DIAGNOSE = Operation("sandbox.diagnose", wire.SandboxFrame, wire.DiagnoseReply, SANDBOX)
LOG = Operation("sandbox.log", wire.SandboxFrame, wire.LogReply, SANDBOX, f"GET {_ONE}/logs")
STATS = Operation("sandbox.stats", wire.SandboxFrame, wire.StatsReply, SANDBOX, f"GET {_ONE}/stats")
STOP = Operation("sandbox.stop", wire.SandboxFrame, messages.DoneReply, SANDBOX, f"DELETE {_ONE}")
CANCEL = Operation("sandbox.cancel", wire.CancelFrame, messages.DoneReply, SANDBOX)
PROGRAM = Operation("sandbox.program", wire.SandboxFrame, wire.StreamEnd, SANDBOX, f"WEBSOCKET {_ONE}/program")
CONNECT = Operation("sandbox.connect", wire.ConnectQuery, wire.StreamEnd, SANDBOX, f"WEBSOCKET {_ONE}/connect")

NODE_FACTS = Operation("node", messages.NoBody, nodes.NodeReply, SANDBOX, f"GET {_V1}/node")
JOIN = Operation("node.join", nodes.JoinFrame, messages.DoneReply, NODE, f"POST {_NODES}:join")
NODE_LIST = Operation("node.list", messages.NoBody, nodes.NodesReply, ADMIN, f"GET {_NODES}")
DRAIN = Operation("node.drain", nodes.DrainFrame, nodes.NodeStatus, ADMIN, f"POST {_NODES}/{{node}}/drain")

OPERATIONS: tuple[Operation[Any, Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Operation)
)
"""All operations."""

METHODS: Mapping[str, Operation[Any, Any]] = {
    one.name: one for one in OPERATIONS if not one.is_raw and one.verb != "WEBSOCKET" and one is not INDEX
}
"""The operations that WebSocket frames can call, by the value of the field `method`."""
