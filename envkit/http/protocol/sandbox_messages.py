"""The messages about sandboxes: one definition for the server, the client and the OpenAPI document.

A sandbox's `sandbox_id` is chosen by the caller, which is what makes its creation safe to repeat. What runs in a
sandbox is made safe by a key: the same call with the same key gives the same answer again
(`envkit.http.sandboxes.idempotency`). How bytes travel is said in `envkit.http.protocol.bytes_encoding`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from envkit.errors import RequestError
from envkit.http.protocol.bytes_encoding import Bytes, decode_bytes, encode_bytes
from envkit.http.protocol.messages import PROTOCOL
from envkit.types import Cause, ExecResult, FileUser, Phase, SandboxSpec, SandboxState, SandboxUser, SandboxView

BEFORE_ID = f"/v{PROTOCOL}/sandboxes/"
"""What the paths of one sandbox begin with."""

LEASE_S = 3600.0
"""Seconds without use after which a sandbox is stopped, unless its maker says otherwise."""

MAX_OUTPUT_BYTES = 64 << 20
"""The most of each output that can be asked for."""

MAX_FRAME_FILE_BYTES = 1 << 20
"""The largest file that is read over a socket; larger ones are read over HTTP."""

MAX_START_S = 600.0

MAX_WAIT_S = 60.0
"""The longest that a call waits for room; who has more patience asks again."""

Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Cpus: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1 << 20)]
Count: TypeAlias = Annotated[int, msgspec.Meta(gt=0, lt=1 << 53)]
OutputBytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_OUTPUT_BYTES)]
Mode: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=0o777)]
_SANDBOX_ID = re.compile(r"^[A-Za-z0-9._~-]{1,128}$(?!\n)")  # Python's own $ lets a last line end pass

SandboxId: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=_SANDBOX_ID.pattern,
        description="1 to 128 letters, digits, dots, dashes, underscores, tildes.",
    ),
]
ShellName: TypeAlias = SandboxId
AnySandboxId: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(:?[A-Za-z0-9._-]{0,32}:)?[A-Za-z0-9._~-]{1,128}$(?!\n)",
        description="As it was made; for an administrator also TENANT:NAME, and :NAME if it was made without tokens.",
    ),
]
Key: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[!-~]{1,255}$(?!\n)",
        description="Makes a call safe to repeat: 1 to 255 visible characters of ASCII, new for each call.",
    ),
]


class SpecBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sandbox is to be; see `envkit.types.SandboxSpec`."""

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
    def of(cls, spec: SandboxSpec) -> SpecBody:
        return cls(**{**{name: getattr(spec, name) for name in _SPEC_FIELDS}, "env": dict(spec.env)})

    def spec(self) -> SandboxSpec:
        return SandboxSpec(**{name: getattr(self, name) for name in _SPEC_FIELDS})


_SPEC_FIELDS = SpecBody.__struct_fields__


class CreateSandboxBody(SpecBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a sandbox is to be, for how long it stays unused (null: for ever), whose files it begins with, and how long
    to wait for room, in turn with all who do.
    """

    lease_s: Positive | None = LEASE_S
    snapshot: str | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class CreateFrame(CreateSandboxBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What which sandbox is to be."""

    sandbox_id: SandboxId


class SandboxFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which sandbox."""

    sandbox_id: AnySandboxId


class ExecBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program, as in `envkit.protocols.Sandbox.exec`. An argument that is not UTF-8 is ``{"base64": "..."}``."""

    argv: Annotated[tuple[Bytes, ...], msgspec.Meta(min_length=1)]
    timeout_s: Positive
    env: dict[str, str] = {}
    cwd: str | None = None
    stdin: bytes = b""
    user: SandboxUser = "agent"
    max_output_bytes: OutputBytes = 1 << 20


class ExecFrame(ExecBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A program in which sandbox."""

    sandbox_id: AnySandboxId
    key: Key | None = None


class ShellBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command in a shell that stays, as in `envkit.protocols.Shell.run`."""

    command: str
    timeout_s: Positive
    user: SandboxUser = "agent"
    max_output_bytes: OutputBytes = 1 << 20


class ShellFrame(ShellBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A command in which shell of which sandbox."""

    sandbox_id: AnySandboxId
    shell: ShellName = "main"
    key: Key | None = None


class CloseShellFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which shell of which sandbox."""

    sandbox_id: AnySandboxId
    shell: ShellName = "main"
    user: SandboxUser = "agent"


class ReadFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which file of which sandbox."""

    sandbox_id: AnySandboxId
    path: str
    max_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAME_FILE_BYTES)] = MAX_FRAME_FILE_BYTES
    user: FileUser = "agent"


class WriteFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file for which sandbox."""

    sandbox_id: AnySandboxId
    path: str
    content: bytes
    mode: Mode | None = None
    key: Key | None = None
    user: FileUser = "agent"


class SnapshotFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which sandbox's files to keep."""

    sandbox_id: AnySandboxId
    key: Key | None = None


class KeptFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which snapshot is meant."""

    snapshot: str


class ProbeFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which sandbox is to give a sign of life."""

    sandbox_id: AnySandboxId
    timeout_s: Positive


class CancelFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which call to end."""

    sandbox_id: AnySandboxId
    key: Key


class ExecReply(msgspec.Struct, frozen=True):
    """What a command did; see `envkit.types.ExecResult`."""

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
        return cls(
            result.exit_code,
            encode_bytes(result.stdout_bytes),
            encode_bytes(result.stderr_bytes),
            result.timed_out,
            result.truncated_bytes,
            result.duration_s,
            result.is_shell_lost,
            result.is_out_of_memory,
        )

    def result(self) -> ExecResult:
        return ExecResult(
            self.exit_code,
            decode_bytes(self.stdout),
            decode_bytes(self.stderr),
            self.timed_out,
            self.truncated_bytes,
            self.duration_s,
            self.is_shell_lost,
            self.is_out_of_memory,
        )


class PhaseReply(msgspec.Struct, frozen=True):
    """Since when (seconds since 1970, UTC) a sandbox is in a state, and why; `cause` where it is over."""

    state: SandboxState
    at_s: float
    reason: str
    cause: Cause | None = None


class SandboxReply(msgspec.Struct, frozen=True):
    """A sandbox from outside; see `envkit.types.SandboxView`. `state` is that of the last phase."""

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
        phases = tuple(Phase(one.state, one.at_s, one.reason, one.cause) for one in self.phases)
        spec = self.spec.spec()
        return SandboxView(self.sandbox_id, self.backend_id, self.node, self.tenant, spec, phases, self.expires_at_s)


class StartingReply(msgspec.Struct, frozen=True):
    """The start goes on; ask again."""

    sandbox_id: str
    state: SandboxState = SandboxState.STARTING


class SandboxesReply(msgspec.Struct, frozen=True):
    """All sandboxes that the caller may see, oldest first."""

    sandboxes: list[SandboxReply]


class LogReply(msgspec.Struct, frozen=True):
    """The last 64 KiB of what a sandbox's command wrote to standard error."""

    log: str


class StatsReply(msgspec.Struct, frozen=True):
    """What is known of a sandbox's use of the machine."""

    stats: dict[str, Any]


class FileReply(msgspec.Struct, frozen=True):
    """What is in a file."""

    content: bytes


class SnapshotReply(msgspec.Struct, frozen=True):
    """The name under which files were kept."""

    snapshot: str


class KeptReply(msgspec.Struct, frozen=True):
    """A snapshot: its name, whose and of which sandbox it is, when it was taken, and what it takes of a disk."""

    snapshot: str
    tenant: str
    sandbox_id: str
    at_s: float
    bytes: int


class SnapshotsReply(msgspec.Struct, frozen=True):
    """Snapshots, oldest first."""

    snapshots: list[KeptReply]


class ProbeReply(msgspec.Struct, frozen=True):
    """Seconds that an answer from inside took."""

    seconds: float


class WaitReply(msgspec.Struct, frozen=True):
    """Why a sandbox is gone; null while it is not: ask again."""

    cause: Cause | None


class EventReply(msgspec.Struct, frozen=True):
    """Something that happened; see `envkit.types.FleetEvent`."""

    number: int
    at_s: float
    kind: str
    sandbox_id: str
    tenant: str
    text: str
    state: SandboxState | None
    cause: Cause | None = None


def read_sandbox_id(text: str) -> str:
    """Return `text` if it can be the name of a sandbox, or of a shell.

    Raises:
        RequestError: It cannot.
    """
    if _SANDBOX_ID.search(text) is None:
        raise RequestError(f"not a name: {text[:200]!r}; use 1 to 128 of A-Z a-z 0-9 . _ ~ -")
    return text


def read_any_sandbox_id(text: str) -> str:
    """Return `text` if a sandbox can be asked for by it.

    Raises:
        RequestError: It cannot.
    """
    try:
        return msgspec.convert(text, AnySandboxId)
    except msgspec.ValidationError:
        return read_sandbox_id(text)


def read_key(text: str) -> str:
    """Return `text` if it can be the key of a call.

    Raises:
        RequestError: It cannot.
    """
    try:
        return msgspec.convert(text, Key)
    except msgspec.ValidationError:
        raise RequestError("Idempotency-Key: use 1 to 255 visible characters of ASCII") from None
