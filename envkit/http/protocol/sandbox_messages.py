"""Messages about sandboxes: one definition for the server, the client and the OpenAPI document.

The caller chooses the `sandbox_id`, so creating a sandbox is safe to repeat. An idempotency key makes a command safe to
repeat: a call that is repeated with the same key gets the same answer (`envkit.http.sandboxes.idempotency`).

The output of a program is encoded as a JSON string if it is valid UTF-8, so that people can read it, and otherwise as
``{"base64": "..."}``. Long output with many control characters is encoded in base64 too, because each control character
takes six bytes in a JSON string. Input from a caller (`stdin`, `content`) is always in base64.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec

from envkit.http.protocol.messages import AnyId, ChosenId, Problem
from envkit.types import Cause, ExecResult, Phase, SandboxSpec, SandboxState, SandboxUser, SandboxView
from envkit.types.sandboxes import Blocked

LEASE_S = 3600.0
"""Default idle time, in seconds, after which a sandbox is stopped."""

MAX_OUTPUT_BYTES = 64 << 20
"""Maximum of `max_output_bytes`, which limits standard output and standard error separately."""

MAX_START_S = 600.0

MAX_WAIT_S = 60.0
"""Maximum seconds that a call waits for capacity; to wait longer, repeat the call."""

_LONG_BYTES = 64 << 10
_CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\f\r"))
"""Control characters, each of which takes six bytes in JSON."""


class Base64(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that are encoded in base64, because they are not valid UTF-8 or are shorter that way."""

    base64: bytes


Bytes: TypeAlias = str | Base64


def encode_argument(argument: str) -> Bytes:
    """Encode a program's argument: a string in which surrogates stand for bytes that are not UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return Base64(os.fsencode(argument))
    return argument


def decode_arguments(arguments: Sequence[Bytes]) -> list[str]:
    """Decode the arguments of a program, which `encode_argument` has encoded."""
    return [value if isinstance(value, str) else os.fsdecode(value.base64) for value in arguments]


def _encode_bytes(content: bytes) -> Bytes:
    if len(content) > _LONG_BYTES:
        controls = len(content) - len(content.translate(None, _CONTROLS))
        if controls > len(content) >> 4:
            return Base64(content)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return Base64(content)


def _decode_bytes(encoded: Bytes) -> bytes:
    return encoded.encode() if isinstance(encoded, str) else encoded.base64


Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Cpus: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1 << 20)]
Count: TypeAlias = Annotated[int, msgspec.Meta(gt=0, lt=1 << 53)]
TerminalSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
OptionalSize: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
OutputBytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_OUTPUT_BYTES)]

Key: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[!-~]{1,255}$(?!\n)",
        description="Idempotency key: 1 to 255 visible ASCII characters. Use a new key for each call.",
    ),
]


class SpecBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The spec of a sandbox; see `envkit.types.SandboxSpec`."""

    command: tuple[str, ...] = ()
    image: str | None = None
    env: dict[str, str] = {}
    cpus: Cpus | None = None
    memory_mib: Count | None = None
    pids: Count | None = None
    disk_mib: Count | None = None
    network: Literal["none", "open"] | tuple[str, ...] = "none"
    profile: Literal["strict", "system"] = "strict"
    views: tuple[tuple[str, str], ...] = ()
    runtime: str | None = None
    untrusted: bool = False
    ttl_s: Positive | None = None
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_START_S)] = 30.0

    @classmethod
    def of(cls, spec: SandboxSpec, **more: Any) -> Self:
        return cls(**{**{name: getattr(spec, name) for name in _SPEC_FIELDS}, "env": dict(spec.env)}, **more)

    def spec(self) -> SandboxSpec:
        return SandboxSpec(**{name: getattr(self, name) for name in _SPEC_FIELDS})


_SPEC_FIELDS = SpecBody.__struct_fields__


class CreateSandboxBody(SpecBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The spec of a new sandbox, and how to start it.

    `lease_s` is the number of seconds without use after which the server stops the sandbox; null means unlimited.
    `snapshot` is the name of a snapshot to start from. `wait_s` is the number of seconds to wait for capacity.
    """

    lease_s: Positive | None = LEASE_S
    snapshot: str | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class CreateFrame(CreateSandboxBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The spec and the id of a new sandbox."""

    sandbox_id: ChosenId


class SandboxFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The id of a sandbox."""

    sandbox_id: AnyId


class ExecBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program to run; see `envkit.protocols.Sandbox.exec`. An argument that is not UTF-8 is ``{"base64": "..."}``."""

    argv: Annotated[tuple[Bytes, ...], msgspec.Meta(min_length=1)]
    timeout_s: Positive
    env: dict[str, str] = {}
    cwd: str | None = None
    stdin: bytes = b""
    user: SandboxUser = "agent"
    max_output_bytes: OutputBytes = 1 << 20


class ExecFrame(ExecBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A program to run in a sandbox."""

    sandbox_id: AnyId
    key: Key | None = None


class ProgramBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a WebSocket: a program with streamed input and output.

    `terminal` is its terminal's rows and columns; null means pipes.
    """

    argv: Annotated[tuple[Bytes, ...], msgspec.Meta(min_length=1)]
    timeout_s: Positive
    env: dict[str, str] = {}
    cwd: str | None = None
    user: SandboxUser = "agent"
    terminal: tuple[TerminalSize, TerminalSize] | None = None


class ConnectQuery(msgspec.Struct, frozen=True):
    """The sandbox to connect to. `to` is the number of a port, or the name of a socket in ``$ENVKIT_SOCKETS``."""

    sandbox_id: AnyId
    to: Annotated[str, msgspec.Meta(min_length=1)]


class ProgramInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a program's input, or a new size of its terminal. If rows or columns are 0, the size is unchanged."""

    eof: bool = False
    rows: OptionalSize = 0
    columns: OptionalSize = 0


class StreamEnd(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a byte stream: the result of a program (without its output), an error, or neither."""

    result: ExecReply | None = None
    error: Problem | None = None


class ShellBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command to run in a persistent shell; see `envkit.protocols.Shell.run`."""

    command: str
    timeout_s: Positive
    user: SandboxUser = "agent"
    max_output_bytes: OutputBytes = 1 << 20


class ShellFrame(ShellBody, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"name": "shell"}):
    """A command to run in a shell of a sandbox. `name`, which is `shell` in JSON, is the name of the shell."""

    sandbox_id: AnyId
    name: ChosenId = "main"
    key: Key | None = None


class CloseShellFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"name": "shell"}):
    """The shell to close, and its sandbox. `name`, which is `shell` in JSON, is the name of the shell."""

    sandbox_id: AnyId
    name: ChosenId = "main"
    user: Annotated[SandboxUser, msgspec.Meta(description="User of the shell.")] = "agent"


class SnapshotFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sandbox of which to take a snapshot."""

    sandbox_id: AnyId
    key: Key | None = None


class KeptFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a snapshot."""

    snapshot: str


class ProbeFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sandbox to probe."""

    sandbox_id: AnyId
    timeout_s: Positive


class CancelFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The call to cancel: its sandbox and its idempotency key."""

    sandbox_id: AnyId
    cancelled: Key = msgspec.field(name="key")


class ExecReply(msgspec.Struct, frozen=True):
    """The result of a command; see `envkit.types.ExecResult`."""

    exit_code: int | None
    stdout: Bytes
    stderr: Bytes
    timed_out: bool
    truncated_bytes: int
    duration_s: float
    is_shell_lost: bool = False
    is_out_of_memory: bool = False

    @classmethod
    def of(cls, result: ExecResult) -> ExecReply:
        others = {name: getattr(result, name) for name in _RESULT_FIELDS}
        return cls(stdout=_encode_bytes(result.stdout_bytes), stderr=_encode_bytes(result.stderr_bytes), **others)

    def result(self) -> ExecResult:
        others = {name: getattr(self, name) for name in _RESULT_FIELDS}
        return ExecResult(stdout_bytes=_decode_bytes(self.stdout), stderr_bytes=_decode_bytes(self.stderr), **others)


_RESULT_FIELDS = tuple(name for name in ExecReply.__struct_fields__ if name not in ("stdout", "stderr"))


class PhaseReply(msgspec.Struct, frozen=True):
    """A phase in the life of a sandbox: its state, its start `at_s` (seconds since 1970), and its reason.

    If the sandbox has ended, `cause` says why.
    """

    state: SandboxState
    at_s: float
    reason: str
    cause: Cause | None = None


class SandboxReply(msgspec.Struct, frozen=True):
    """The status of a sandbox; see `envkit.types.SandboxView`. `phases` is its history, `state` its current state."""

    sandbox_id: str
    state: SandboxState
    backend_id: str
    node: str
    tenant: str
    spec: SpecBody
    phases: list[PhaseReply]
    expires_at_s: float | None

    @classmethod
    def of(cls, view: SandboxView) -> SandboxReply:
        phases = [PhaseReply(*phase) for phase in view.phases]
        spec = SpecBody.of(view.spec)
        return cls(view.id, view.state, view.backend_id, view.node, view.tenant, spec, phases, view.expires_at_s)

    def view(self) -> SandboxView:
        phases = tuple(Phase(phase.state, phase.at_s, phase.reason, phase.cause) for phase in self.phases)
        spec = self.spec.spec()
        return SandboxView(self.sandbox_id, self.backend_id, self.node, self.tenant, spec, phases, self.expires_at_s)


class StartingReply(msgspec.Struct, frozen=True):
    """The sandbox is still starting; repeat the call."""

    sandbox_id: str
    state: SandboxState = SandboxState.STARTING


class SandboxesReply(msgspec.Struct, frozen=True):
    """All sandboxes that the caller may see, oldest first."""

    sandboxes: list[SandboxReply]


class LogReply(msgspec.Struct, frozen=True):
    """The last 64 KiB that the command of a sandbox wrote to standard error."""

    log: str


class StatsReply(msgspec.Struct, frozen=True):
    """Resource usage of a sandbox."""

    stats: dict[str, Any]


class SnapshotReply(msgspec.Struct, frozen=True):
    """The name of a new snapshot."""

    snapshot: str


class KeptReply(msgspec.Struct, frozen=True):
    """A snapshot: its name, tenant and sandbox, when it was taken (seconds since 1970), and its size on disk."""

    snapshot: str
    tenant: str
    sandbox_id: str
    at_s: float
    bytes: int


class SnapshotsReply(msgspec.Struct, frozen=True):
    """All snapshots that the caller may see, oldest first."""

    snapshots: list[KeptReply]


class ProbeReply(msgspec.Struct, frozen=True):
    """Seconds until the sandbox answered a probe."""

    seconds: float


class WaitReply(msgspec.Struct, frozen=True):
    """Why a sandbox has ended. If `cause` is null, the sandbox still runs; repeat the call to wait longer."""

    cause: Cause | None


class DiagnoseReply(msgspec.Struct, frozen=True):
    """Why a sandbox does not answer, as far as its host can see; empty if that is unknown."""

    blocked: Blocked
