"""The messages of protocol version 1: one definition for the server, the client and the OpenAPI document.

Two words run through all of them. A session's `id` is chosen by the caller, which is what makes every call safe to
repeat. A session's `turn` is the number of steps that it has played, so it is also the number to send with the next
step; every answer names it.

JSON has no NaN and no infinity. A reward that is one travels as the string ``"nan"``, ``"inf"`` or ``"-inf"``; in
``info`` they become null.
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
"""Version of the protocol; the paths begin with it."""

SOCKET_PATH = f"/v{PROTOCOL}/ws"
"""Where the WebSocket is."""

MAX_REQUEST_BYTES = 1 << 20
"""Size of a body, and of one frame of a socket, above which a server refuses it unless told otherwise."""

MAX_MESSAGE_BYTES = 16 << 20
"""Size of one WebSocket message from a client, which may hold many frames."""

MAX_FRAMES = 1000
"""Frames that one WebSocket message from a client may hold."""

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)  # msgspec's own were no ValueErrors once
"""What a decoder raises."""

T = TypeVar("T")
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])

Natural = Annotated[int, msgspec.Meta(ge=0)]
SessionId = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9._~-]{1,128}$(?!\n)",  # Python's own $ lets a last line end pass
        description="Chosen by the caller: 1 to 128 letters, digits, dots, dashes, underscores, tildes.",
    ),
]

AnySessionId = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(:?[A-Za-z0-9._-]{0,32}:)?[A-Za-z0-9._~-]{1,128}$(?!\n)",
        description="As it was made; for an administrator also TENANT:NAME, and :NAME if it was made without tokens.",
    ),
]


class TaskBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to play."""

    env_id: Annotated[str, msgspec.Meta(max_length=256)]
    seed: Natural
    options: dict[str, Any] = {}

    def task(self) -> Task:
        return Task(self.env_id, self.seed, self.options)


class StepBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One move: `turn` is the session's turn before it."""

    turn: Natural
    action: str


class SessionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which session."""

    session_id: AnySessionId


class CreateSessionBody(TaskBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to play, in which session."""

    session_id: SessionId


class SessionStepBody(StepBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One move in which session."""

    session_id: str
    """Its form is not looked at, at a fifth of a step's cost: whatever is not so called is not there."""


class NoBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a call that has none."""


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
    """The reset goes on; ask again."""

    turn: int
    state: str


class StepReply(msgspec.Struct, frozen=True):
    """The world's answer to one move."""

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
    """A session from outside. `state` is opening, ready, stepping, finished or broken."""

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
    """An environment that can be played."""

    id: str
    summary: str
    options: dict[str, Any]
    replayable: bool


class EnvsReply(msgspec.Struct, frozen=True):
    """All environments, by id."""

    envs: list[EnvReply]


class HealthReply(msgspec.Struct, frozen=True):
    """The server is alive."""

    version: str
    protocol: int = PROTOCOL
    status: str = "alive"


class IndexReply(msgspec.Struct, frozen=True):
    """The entry points of the API: paths, and what each is for."""

    version: str
    protocol: int
    links: dict[str, str]


class ReadyReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a session can be made now: `leased` of `capacity` places are taken. `why` says why not."""

    ready: bool
    capacity: int
    leased: int
    why: str = ""


class DoneReply(msgspec.Struct, frozen=True):
    """It is done."""

    done: bool = True


class Problem(msgspec.Struct, frozen=True):
    """What went wrong (RFC 9457): `type` is a code of `envkit.errors`. `turn` is the session's, where there is one."""

    type: str
    title: str
    status: int
    detail: str
    retry: bool
    fields: dict[str, Any]
    turn: int | None = None


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answer among several: either what was asked for, or what went wrong; the other is left out."""

    result: StepReply | None = None
    error: Problem | None = None


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call on a socket. `id` is the caller's and comes back with the answer."""

    id: int | str
    method: str
    params: msgspec.Raw = msgspec.Raw(b"{}")


class StepFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="method", tag="step"):
    """A `Frame` that asks for a step, as most do: read in one go, which is half of the cost."""

    id: int | str
    params: SessionStepBody


class StepAnswer(msgspec.Struct, frozen=True):
    """The answer to a `StepFrame` whose step was played."""

    id: int | str
    result: StepReply


class Answer(msgspec.Struct, frozen=True):
    """The answer to a frame: one of `result` and `error`. The id is null if the frame could not be read."""

    id: int | str | None
    result: msgspec.Raw = msgspec.Raw(b"")
    error: dict[str, Any] | None = None


def read(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode one message.

    Raises:
        RequestError: It is not JSON, or not what was expected; names the field and what is wrong with it.
    """
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise RequestError(explained(error, data, decoder.type)) from None


def read_id(text: str) -> str:
    """Return `text` if it can be the id of a session.

    Raises:
        RequestError: It cannot.
    """
    try:
        return msgspec.convert(text, SessionId)
    except msgspec.ValidationError:
        raise RequestError(f"not the id of a session: {text[:200]!r}; use 1 to 128 of A-Z a-z 0-9 . _ ~ -") from None


def read_each(data: bytes, many: msgspec.json.Decoder[list[T]], one: msgspec.json.Decoder[T]) -> list[T | RequestError]:
    """Decode a list whose elements may be wrong one by one.

    Raises:
        RequestError: It is not a list.
    """
    with suppress(*UNREADABLE):
        return [*many.decode(data)]
    each: list[T | RequestError] = []
    for raw in read(data, _RAWS):
        try:
            each.append(read(raw, one))
        except RequestError as error:
            each.append(error)
    return each


def write(message: object) -> bytes:
    """Encode one message; values of NumPy are allowed.

    Raises:
        RequestError: It holds something that JSON cannot say.
    """
    try:
        return _ENCODER.encode(message)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"cannot be said in JSON: {error}") from None


def batches(messages: Sequence[bytes], most_bytes: int) -> Iterator[bytes]:
    """Join messages into JSON lists of about `most_bytes`, and `MAX_FRAMES`, at most; one alone goes without a list."""
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


def _plain(value: object) -> object:
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"a {type(value).__name__} is not JSON")
    return cast("object", to_list())  # NumPy's scalars and arrays


def _joined(batch: Sequence[bytes]) -> bytes:
    return batch[0] if len(batch) == 1 else b"[%b]" % b",".join(batch)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
