"""Messages of protocol version 1: one definition for the server, the client and the OpenAPI document.

The caller chooses the `id` of a session, so every call is safe to repeat. The `turn` of a session is the number of
steps that were played in it. Every answer contains the turn, and the caller sends it with the next step.

JSON cannot express NaN and infinity. In ``info``, such values become null.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import msgspec

from envkit.errors import RequestError
from envkit.http.protocol.decode_errors import explained
from envkit.runs.files import plain
from envkit.types import Observation, Reset, Role, Step, Task, ToolSchema

PROTOCOL = 1
"""Version of the protocol. The paths of version 1 begin with ``/v1``."""

SOCKET_PATH = f"/v{PROTOCOL}/ws"
"""Path of the WebSocket."""

MODEL_PATHS = frozenset(
    f"/v{PROTOCOL}/{route}"
    for route in ("chat/completions", "responses", "messages", "messages/count_tokens", "models")
)
"""Paths of the language model, which are those of OpenAI and Anthropic."""

MAX_REQUEST_BYTES = 1 << 20
"""Default maximum size of a request body or WebSocket frame, in bytes."""

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum size of one WebSocket message from a client, in bytes; a message may contain many frames."""

MAX_FRAMES = 1000
"""Maximum number of frames in one WebSocket message from a client."""

# List MsgspecError too, because it is not a ValueError in older versions of msgspec.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Exceptions that a decoder raises for invalid data."""

T = TypeVar("T")
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])

Natural = Annotated[int, msgspec.Meta(ge=0)]
ChosenId = Annotated[
    str,
    msgspec.Meta(
        # In Python, $ also matches before a final newline. The lookahead rejects an id that ends with a newline.
        pattern=r"^[A-Za-z0-9._~-]{1,128}$(?!\n)",
        description="Chosen by the caller: 1 to 128 letters, digits, dots, dashes, underscores, tildes.",
    ),
]
AnyId = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(:?[A-Za-z0-9._-]{0,32}:)?[A-Za-z0-9._~-]{1,128}$(?!\n)",
        description="Id. Administrators also use TENANT:ID, or :ID if it was created without tokens.",
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
    """A step to play: the action, and the `turn` of the session before the step."""

    turn: Natural
    action: str


class SessionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The id of a session."""

    session_id: AnyId


class CreateSessionBody(TaskBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The id and the task of a new session."""

    session_id: ChosenId


class SessionStepBody(StepBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step of a session."""

    session_id: str
    """Not validated: validation would take a fifth of a step's time. A call with an invalid id finds no session."""


class NoBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The empty parameters of a call that takes none."""


class ResetReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first observation of an episode, after the reset.

    `role` is user or tool. `system` is the environment's system prompt, and `tools` are the tools that the player may
    call, in the format of the OpenAI API. If `is_graded`, the reward of the episode is only complete after a call of
    `grade`. The last three are limits of the environment itself, in seconds; see `envkit.types.Reset`.
    """

    turn: int
    observation: str
    legal_moves: tuple[str, ...]
    images: tuple[str, ...]
    info: dict[str, Any]
    role: Role = "user"
    system: str | None = None
    tools: tuple[ToolSchema, ...] = ()
    is_graded: bool = False
    step_limit_s: float | None = None
    grade_limit_s: float | None = None
    episode_limit_s: float | None = None

    @classmethod
    def of(cls, turn: int, reset: Reset) -> ResetReply:
        seen = reset.observation
        first = (seen.text, seen.legal_moves, seen.images, reset.info, seen.role)
        limits = (reset.step_limit_s, reset.grade_limit_s, reset.episode_limit_s)
        return cls(turn, *first, reset.system, reset.tools, reset.is_graded, *limits)

    def reset(self) -> Reset:
        observation = Observation(self.observation, self.legal_moves, self.images, self.role)
        limits = (self.step_limit_s, self.grade_limit_s, self.episode_limit_s)
        return Reset(observation, self.info, self.system, self.tools, self.is_graded, *limits)


class OpeningReply(msgspec.Struct, frozen=True):
    """The reset of the environment is still running; repeat the call."""

    turn: int = 0
    state: str = "opening"


class StepReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The environment's answer to one step. `role` is tool for the result of a tool call, otherwise user."""

    turn: int
    observation: str
    legal_moves: tuple[str, ...]
    images: tuple[str, ...]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    role: Role = "user"

    @classmethod
    def of(cls, turn: int, step: Step) -> StepReply:
        seen = step.observation
        return cls(
            turn,
            seen.text,
            seen.legal_moves,
            seen.images,
            step.reward,
            step.terminated,
            step.truncated,
            step.info,
            seen.role,
        )

    def step(self) -> Step:
        observation = Observation(self.observation, self.legal_moves, self.images, self.role)
        return Step(observation, self.reward, self.terminated, self.truncated, self.info)


class GradeReply(msgspec.Struct, frozen=True):
    """The reward that the grader adds to those of the steps; null if the grader could not run: the episode is void."""

    grade: float | None


class GradingReply(msgspec.Struct, frozen=True):
    """The grader is still running; repeat the call."""

    state: str = "grading"


class SessionReply(msgspec.Struct, frozen=True):
    """The status of a session. `state` is opening, ready, stepping, ungraded, grading, finished or broken."""

    session_id: str
    env_id: str
    seed: int
    options: dict[str, Any]
    state: str
    turn: int
    idle_s: float


class SessionsReply(msgspec.Struct, frozen=True):
    """All sessions that the caller may see, oldest first."""

    sessions: list[SessionReply]


class EnvReply(msgspec.Struct, frozen=True):
    """An environment that the server offers."""

    id: str
    summary: str
    options: dict[str, Any]
    replayable: bool


class EnvsReply(msgspec.Struct, frozen=True):
    """All environments that the server offers, sorted by id."""

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
    """Whether the caller can create a session now; if not, `why` is the reason. `leased` of `capacity` slots are in
    use. `limit` is the number of slots that the caller's tenant may use, if it is lower than `capacity`. Over HTTP this
    call needs no token, so the reply does not depend on the tenant.
    """

    ready: bool
    capacity: int
    leased: int
    why: str = ""
    limit: int | None = None


class DoneReply(msgspec.Struct, frozen=True):
    """The call has succeeded; there is no other result."""

    done: bool = True


class Problem(msgspec.Struct, frozen=True):
    """An error, as in RFC 9457. `type` is envkit's error code. If the call is about a session, `turn` is its turn."""

    type: str
    title: str
    status: int
    detail: str
    retry: bool
    fields: dict[str, Any]
    turn: int | None = None


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of one step in a list. It has the field `result` if the step was played, and otherwise `error`."""

    result: StepReply | None = None
    error: Problem | None = None


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call over the WebSocket. The caller chooses the `id` of the frame, and the answer has the same id."""

    id: int | str
    method: str
    params: msgspec.Raw = msgspec.Raw(b"{}")


class StepFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="method", tag="step"):
    """A frame that plays a step. This most frequent frame has its own type, because it is then decoded twice as
    fast.
    """

    id: int | str
    params: SessionStepBody


class StepAnswer(msgspec.Struct, frozen=True):
    """The answer to a `StepFrame` whose step was played."""

    id: int | str
    result: StepReply


class Answer(msgspec.Struct, frozen=True):
    """The answer to a frame, with `result` or `error`. Its `id` is that of the frame; null if the frame is invalid."""

    id: int | str | None
    result: msgspec.Raw = msgspec.Raw(b"")
    error: dict[str, Any] | None = None


def read(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode one message; if it is invalid, raise `RequestError`, which names the field and the reason."""
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise RequestError(explained(error, data, decoder.type)) from None


def read_each(data: bytes, many: msgspec.json.Decoder[list[T]], one: msgspec.json.Decoder[T]) -> list[T | RequestError]:
    """Decode a list with `many`. If that fails, decode each message with `one`, and return an error for an invalid one.

    Raises `RequestError` if the data is not a JSON list.
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
    """Encode one message; NumPy values are allowed. Raises `RequestError` for a value that JSON cannot encode."""
    try:
        return _ENCODER.encode(message)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"cannot be encoded as JSON: {error}") from None


def batches(messages: Sequence[bytes], most_bytes: int) -> Iterator[bytes]:
    """Join messages into JSON lists of about `most_bytes` bytes and at most `MAX_FRAMES` messages.

    A list of only one message is yielded as that message, without a list around it.
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


def _joined(batch: Sequence[bytes]) -> bytes:
    return batch[0] if len(batch) == 1 else b"[%b]" % b",".join(batch)


_ENCODER = msgspec.json.Encoder(enc_hook=plain)
