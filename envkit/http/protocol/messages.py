"""Messages of protocol version 1: one definition for the server, the client and the OpenAPI document.

The caller chooses a session's `id`, so every call is safe to repeat. A session's `turn` is the number of steps that it
has played. Every answer contains it, and the next step must contain it.

JSON has no NaN and no infinity. Such a reward is sent as the string ``"nan"``, ``"inf"`` or ``"-inf"``; in ``info``
they become null.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar, cast

import msgspec

from envkit.errors import RequestError
from envkit.http.protocol.decode_errors import explained
from envkit.types import Observation, Reset, Step, Task

PROTOCOL = 1
"""Version of the protocol, the prefix of its paths."""

SOCKET_PATH = f"/v{PROTOCOL}/ws"
"""Path of the WebSocket."""

MAX_REQUEST_BYTES = 1 << 20
"""Default maximum of a request body or socket frame, bytes."""

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum of one WebSocket message from a client, bytes; it may contain many frames."""

MAX_FRAMES = 1000
"""Maximum number of frames in one WebSocket message from a client."""

# In older versions of msgspec these errors are not ValueErrors.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of a decoder."""

T = TypeVar("T")
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])

Natural = Annotated[int, msgspec.Meta(ge=0)]
SessionId = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9._~-]{1,128}$(?!\n)",  # Python's $ also matches before a final newline
        description="Chosen by the caller: 1 to 128 letters, digits, dots, dashes, underscores, tildes.",
    ),
]

AnySessionId = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(:?[A-Za-z0-9._-]{0,32}:)?[A-Za-z0-9._~-]{1,128}$(?!\n)",
        description="Its id; administrators also use TENANT:ID, or :ID if it was created without tokens.",
    ),
]


class TaskBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The task of a session."""

    env_id: Annotated[str, msgspec.Meta(max_length=256)]
    seed: Natural
    options: dict[str, Any] = {}

    def task(self) -> Task:
        return Task(self.env_id, self.seed, self.options)


class StepBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step: `turn` is the session's turn before it."""

    turn: Natural
    action: str


class SessionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The id of a session."""

    session_id: AnySessionId


class CreateSessionBody(TaskBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The task of a new session."""

    session_id: SessionId


class SessionStepBody(StepBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step of a session."""

    session_id: str
    """Not validated, because that would take a fifth of the time of a step. No session has an invalid id."""


class NoBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a call without parameters."""


class ResetReply(msgspec.Struct, frozen=True):
    """The start of an episode."""

    turn: int
    observation: str
    legal_moves: tuple[str, ...]
    images: tuple[str, ...]
    info: dict[str, Any]

    @classmethod
    def of(cls, turn: int, reset: Reset) -> ResetReply:
        seen = reset.observation
        return cls(turn, seen.text, seen.legal_moves, seen.images, reset.info)

    def reset(self) -> Reset:
        return Reset(Observation(self.observation, self.legal_moves, self.images), self.info)


class OpeningReply(msgspec.Struct, frozen=True):
    """The reset is still running; repeat the call."""

    turn: int
    state: str


class StepReply(msgspec.Struct, frozen=True):
    """The environment's answer to one step."""

    turn: int
    observation: str
    legal_moves: tuple[str, ...]
    images: tuple[str, ...]
    reward: float | str
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @classmethod
    def of(cls, turn: int, step: Step) -> StepReply:
        seen, reward = step.observation, step.reward
        return cls(
            turn,
            seen.text,
            seen.legal_moves,
            seen.images,
            reward if math.isfinite(reward) else str(reward),
            step.terminated,
            step.truncated,
            step.info,
        )

    def step(self) -> Step:
        observation = Observation(self.observation, self.legal_moves, self.images)
        return Step(observation, float(self.reward), self.terminated, self.truncated, self.info)


class SessionReply(msgspec.Struct, frozen=True):
    """The status of a session. `state` is opening, ready, stepping, finished or broken."""

    session_id: str
    env_id: str
    seed: int
    options: dict[str, Any]
    state: str
    turn: int
    idle_s: float


class SessionsReply(msgspec.Struct, frozen=True):
    """All sessions of the server, oldest first."""

    sessions: list[SessionReply]


class EnvReply(msgspec.Struct, frozen=True):
    """An available environment."""

    id: str
    summary: str
    options: dict[str, Any]
    replayable: bool


class EnvsReply(msgspec.Struct, frozen=True):
    """All environments, sorted by id."""

    envs: list[EnvReply]


class HealthReply(msgspec.Struct, frozen=True):
    """The server is alive."""

    version: str
    protocol: int = PROTOCOL
    status: str = "alive"


class IndexReply(msgspec.Struct, frozen=True):
    """The entry points of the API: paths and their purpose."""

    version: str
    protocol: int
    links: dict[str, str]


class ReadyReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a session can be created now: `leased` of `capacity` slots are in use. `why` is the reason if not."""

    ready: bool
    capacity: int
    leased: int
    why: str = ""


class DoneReply(msgspec.Struct, frozen=True):
    """The call is done."""

    done: bool = True


class Problem(msgspec.Struct, frozen=True):
    """An error (RFC 9457): `type` is a code of `envkit.errors`. `turn` is the session's turn, if there is a session."""

    type: str
    title: str
    status: int
    detail: str
    retry: bool
    fields: dict[str, Any]
    turn: int | None = None


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result or the error of one call in a list; the other field is omitted."""

    result: StepReply | None = None
    error: Problem | None = None


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call on a socket. The caller chooses `id`; the answer has the same id."""

    id: int | str
    method: str
    params: msgspec.Raw = msgspec.Raw(b"{}")


class StepFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="method", tag="step"):
    """A `Frame` with a step, the most frequent kind. Decoding it directly takes half the time."""

    id: int | str
    params: SessionStepBody


class StepAnswer(msgspec.Struct, frozen=True):
    """The answer to a `StepFrame` whose step was played."""

    id: int | str
    result: StepReply


class Answer(msgspec.Struct, frozen=True):
    """The answer to a frame: either `result` or `error`. The id is null if the frame could not be read."""

    id: int | str | None
    result: msgspec.Raw = msgspec.Raw(b"")
    error: dict[str, Any] | None = None


def read(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode one message.

    Raises:
        RequestError: `data` is not JSON, or not a message of this type; the error names the field and the reason.
    """
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise RequestError(explained(error, data, decoder.type)) from None


def read_id(text: str) -> str:
    """Return `text` if it is a valid session id.

    Raises:
        RequestError: It is not.
    """
    try:
        return msgspec.convert(text, SessionId)
    except msgspec.ValidationError:
        raise RequestError(f"invalid session id {text[:200]!r}; use 1 to 128 of A-Z a-z 0-9 . _ ~ -") from None


def read_each(data: bytes, many: msgspec.json.Decoder[list[T]], one: msgspec.json.Decoder[T]) -> list[T | RequestError]:
    """Decode a list; an invalid element becomes an error in its place.

    Raises:
        RequestError: It is not a list.
    """
    with suppress(*UNREADABLE):
        return [*many.decode(data)]
    decoded: list[T | RequestError] = []
    for raw in read(data, _RAWS):
        try:
            decoded.append(read(raw, one))
        except RequestError as error:
            decoded.append(error)
    return decoded


def write(message: object) -> bytes:
    """Encode one message; NumPy values are allowed.

    Raises:
        RequestError: It contains a value that JSON cannot encode.
    """
    try:
        return _ENCODER.encode(message)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"cannot be encoded as JSON: {error}") from None


def batches(messages: Sequence[bytes], most_bytes: int) -> Iterator[bytes]:
    """Join messages into JSON lists of about `most_bytes` bytes and at most `MAX_FRAMES` messages. A message that
    stands alone is not put into a list.
    """
    if messages and len(messages) <= MAX_FRAMES and sum(map(len, messages)) <= most_bytes:
        yield _joined(messages)
        return
    batch: list[bytes] = []
    size = 0
    for message in messages:
        if batch and (size + len(message) > most_bytes or len(batch) == MAX_FRAMES):
            yield _joined(batch)
            batch, size = [], 0
        batch.append(message)
        size += len(message)
    if batch:
        yield _joined(batch)


def _to_list(value: object) -> object:
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"{type(value).__name__} is not a JSON type")
    return cast("object", to_list())  # NumPy's scalars and arrays


def _joined(batch: Sequence[bytes]) -> bytes:
    return batch[0] if len(batch) == 1 else b"[%b]" % b",".join(batch)


_ENCODER = msgspec.json.Encoder(enc_hook=_to_list)
