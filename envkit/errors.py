"""Error classes: one for each kind of error that a caller may want to handle separately.

Each class has a `code` for HTTP answers, an HTTP `status`, and `retry`, which says whether the same call may succeed.
Constructor arguments are stored as attributes, whose names are in `fields`, so that errors can be pickled and sent over
HTTP (`to_problem`, `from_problem`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Self

import msgspec

from envkit.types.outcomes import StopReason
from envkit.types.sandboxes import Cause, CauseKind


class EnvkitError(Exception):
    """Base class of all errors that envkit raises on purpose.

    Attributes:
        detail: One-sentence message: what is wrong, where, and what the user can do.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retry: ClassVar[bool] = False
    fields: ClassVar[tuple[str, ...]] = ("detail",)

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), tuple(getattr(self, name) for name in self.fields)


class ConfigError(EnvkitError):
    """An invalid configuration.

    Attributes:
        problems: One line per problem. Each line starts with the key of the setting that is invalid.
    """

    code = "config"
    status = 422
    fields = ("problems",)

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class UsageError(EnvkitError):
    """A path, port, model or folder that cannot be used. The message says what to do."""

    code = "usage"
    status = 422


class UnknownEnvError(EnvkitError):
    """No environment is registered under this id.

    Attributes:
        hint: What the caller should do; if empty, the message suggests one of the registered ids `known`.
    """

    code = "unknown_env"
    status = 404
    fields = ("env_id", "known", "hint")

    def __init__(self, env_id: str, known: Iterable[str] = (), hint: str = "") -> None:
        self.env_id = env_id
        self.known = tuple(known)
        self.hint = hint
        remedy = f"; {hint}" if hint else did_you_mean(env_id, self.known)
        super().__init__(f"no environment is called {env_id!r}{remedy}")


class OptionError(EnvkitError, ValueError):
    """An environment or a sandbox rejects an option."""

    code = "bad_option"
    status = 422
    fields = ("option", "reason")

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason


class RequestError(EnvkitError):
    """A message that the protocol does not allow: bad JSON, a missing field, a wrong type."""

    code = "bad_request"
    status = 400


class TooLargeError(RequestError):
    """A message or file exceeds the receiver's size limit."""

    code = "too_large"
    status = 413


class UnknownPathError(RequestError):
    """A request for a URL path that the server does not define. Unknown sessions and sandboxes raise other errors."""

    code = "not_found"
    status = 404


class StepOrderError(EnvkitError):
    """A step was requested before the reset, after the end of the episode, or with the wrong turn number."""

    code = "step_order"
    status = 409


class SessionNotFoundError(EnvkitError):
    """No session has this id: it was never created, was ended, or expired."""

    code = "session_not_found"
    status = 404


class SessionConflictError(EnvkitError):
    """The session has another task, its turn was played with another action, or an engine is completing its prompt."""

    code = "session_conflict"
    status = 409


class SessionBrokenError(EnvkitError):
    """An earlier step was cancelled or failed. The session's state is unknown, and its episode cannot continue."""

    code = "session_broken"
    status = 410


class CapacityError(EnvkitError):
    """All capacity is in use; the same call may succeed later."""

    code = "no_capacity"
    status = 503
    retry = True


class LeaseNotPersistedError(EnvkitError):
    """The server does not grant a lease because it cannot write the lease to its disk, for example if the disk is full.

    The same call may succeed after the operator has freed space.
    """

    code = "lease_not_persisted"
    status = 503
    retry = True

    def __init__(self, detail: str = "cannot persist leases (disk full?); retry later") -> None:
        super().__init__(detail)


class UnauthorizedError(EnvkitError):
    """The caller's token is missing or invalid."""

    code = "unauthorized"
    status = 401


class ForbiddenError(EnvkitError):
    """The caller's token does not allow the operation."""

    code = "forbidden"
    status = 403


class RateLimitError(EnvkitError):
    """The tenant exceeded a limit, such as that of its concurrent requests; the same call may succeed later.

    Attributes:
        wait_s: Seconds to wait before the call is repeated.
    """

    code = "rate_limit"
    status = 429
    retry = True
    fields = ("detail", "wait_s")

    def __init__(self, detail: str, wait_s: float = 1.0) -> None:
        super().__init__(detail)
        self.wait_s = wait_s


class DeadlineError(EnvkitError):
    """The answer did not arrive within the caller's timeout."""

    code = "deadline"
    status = 504


class PlayerStoppedError(EnvkitError):
    """A player ends its episode.

    Attributes:
        stop: Why. If it makes the episode void, `reason` says what failed.
        reason: Why, in one line.
    """

    code = "player_stopped"
    fields = ("stop", "reason")

    def __init__(self, stop: StopReason, reason: str = "") -> None:
        self.stop = StopReason(stop)
        super().__init__(reason or self.stop.value)
        self.reason = reason


class EnvError(EnvkitError):
    """The environment raised an exception, which is a bug in the environment and not a mistake of the policy.

    Attributes:
        cause: Class of the exception, method of the environment that raised it, and message of the exception.
        place: ``FILE:LINE`` of the innermost traceback frame in the environment's own code; empty if unknown.
        trace: The traceback; empty if unknown.
    """

    code = "env_error"
    fields = ("env_id", "cause", "place", "trace")

    def __init__(self, env_id: str, cause: str, place: str = "", trace: str = "") -> None:
        super().__init__(f"{env_id} raised {cause}{f' ({place})' if place else ''}")
        self.env_id = env_id
        self.cause = cause
        self.place = place
        self.trace = trace

    def for_callers(self) -> EnvError:
        """Return a copy of the error for remote callers, without the traceback and without the folder in `place`."""
        return EnvError(self.env_id, self.cause, self.place.rpartition("/")[2])


class EnvRejectedError(EnvkitError):
    """New episodes of an environment are rejected, because its episodes killed too many sandboxes.

    Attributes:
        losses: Number of sandboxes that its episodes killed within the last `window_s` seconds.
        cause: Cause of the most recent loss.
        wait_s: Seconds until a new episode may start.
    """

    code = "env_rejected"
    status = 429
    fields = ("env_id", "losses", "window_s", "cause", "wait_s")

    def __init__(self, env_id: str, losses: int, window_s: float, cause: str, wait_s: float) -> None:
        super().__init__(
            f"{env_id} is rejected: its episodes killed {losses} sandboxes within {window_s:g} s (the last: {cause}); "
            f"fix the environment, or wait {wait_s:.0f} s"
        )
        self.env_id = env_id
        self.losses = losses
        self.window_s = window_s
        self.cause = cause
        self.wait_s = wait_s


class UnreachableError(EnvkitError):
    """The server does not answer, or the connection to it broke."""

    code = "unreachable"
    status = 503
    retry = True


class UnsupportedError(EnvkitError):
    """This machine or backend does not support the operation. The same call will fail again."""

    code = "unsupported"
    status = 501


class SearchLimitError(EnvkitError):
    """A search reached its limit before it found a result. A larger limit may help."""

    code = "search_limit"
    status = 422


class SandboxError(EnvkitError):
    """A problem with a sandbox itself, not with the code that runs in it."""

    code = "sandbox"


class SandboxStartError(SandboxError):
    """The sandbox never became ready.

    Attributes:
        cause: Why. A string becomes the detail of a cause of kind ``start_failed``.
    """

    code = "sandbox_start"
    status = 503
    fields: ClassVar[tuple[str, ...]] = ("sandbox_id", "cause")

    def __init__(self, sandbox_id: str, cause: Cause | str) -> None:
        super().__init__(f"sandbox {sandbox_id} did not start: {cause}")
        self.sandbox_id = sandbox_id
        self.cause = Cause(CauseKind.START_FAILED, cause) if isinstance(cause, str) else cause


class SandboxRefusedError(SandboxStartError):
    """The sandbox was not started because its spec is invalid or not supported. The same call will fail again.

    Attributes:
        everywhere: Whether every backend would refuse the spec. False if only this backend on this machine does.
    """

    code = "sandbox_refused"
    status = 422
    fields = ("sandbox_id", "cause", "everywhere")

    def __init__(self, sandbox_id: str, cause: Cause | str, everywhere: bool = False) -> None:
        super().__init__(sandbox_id, cause)
        self.everywhere = everywhere


class SandboxEndedError(SandboxStartError):
    """The sandbox ended before it was ready, for a reason that lies in its spec and not in the machine.

    Its command exited, it reached its time to live, its files exceeded its disk limit, or its start timeout or memory
    limit is too small for any sandbox.
    """

    code = "sandbox_ended"
    status = 422


class SandboxLostError(SandboxError):
    """The sandbox was healthy and has ended unexpectedly, and with it everything that ran in it."""

    code = "sandbox_lost"
    status = 503
    fields = ("sandbox_id", "cause")

    def __init__(self, sandbox_id: str, cause: Cause) -> None:
        super().__init__(f"sandbox {sandbox_id} lost: {cause.detail}")
        self.sandbox_id = sandbox_id
        self.cause = cause


class SandboxNotFoundError(SandboxError):
    """No sandbox has this id: it was never created, was stopped long ago, or belongs to another tenant."""

    code = "sandbox_not_found"
    status = 404


class SandboxConflictError(SandboxError):
    """The id belongs to a sandbox with another spec, or the idempotency key was already used for another call."""

    code = "sandbox_conflict"
    status = 409


class ImpossibleSandboxError(SandboxError):
    """The sandbox is too large for every node of the pool, even an empty one. The message names the resource."""

    code = "sandbox_impossible"
    status = 422


class MissingFileError(SandboxError):
    """The sandbox has no such file or folder."""

    code = "missing_file"
    status = 404


class RefusedFileError(SandboxError):
    """A file in the sandbox cannot be read or written, for example because of permissions or a full disk."""

    code = "refused_file"
    status = 403


_LONGEST = 200
"""Number of characters of the unknown word that `did_you_mean` compares. It ignores the rest to save time."""


def did_you_mean(word: str, known: Iterable[str], *, lists: bool = True) -> str:
    """Return a hint to append to an error about the unknown name `word`, such as ``"; did you mean 'Sokoban-v0'?"``.

    The hint suggests the closest name in `known`. If no name is close, it lists all of them, if `lists` is true.
    """
    names = sorted(known)
    lowered = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word[:_LONGEST].lower(), lowered, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {lowered[near[0]]!r}?"
    return f"; there are: {', '.join(names)}" if names and lists else ""


def _classes(root: type[EnvkitError]) -> Iterable[type[EnvkitError]]:
    yield root
    for child in root.__subclasses__():
        yield from _classes(child)


def to_problem(error: EnvkitError) -> dict[str, object]:
    """Return the error as a problem in the format of RFC 9457, to be sent over HTTP. It has no stack trace."""
    return {
        "type": error.code,
        "title": type(error).__name__,
        "status": error.status,
        "detail": str(error),
        "retry": error.retry,
        "fields": {name: getattr(error, name) for name in error.fields},
    }


def from_problem(problem: Mapping[str, object]) -> EnvkitError:
    """Return the error that `to_problem` converted. An unknown `type` or invalid fields give a plain `EnvkitError`.

    A malicious peer cannot cause imports, because `type` only selects one of the error classes already in memory.
    """
    detail = str(problem.get("detail", "the server reported an error without details"))
    found = next((one for one in _classes(EnvkitError) if one.code == problem.get("type")), EnvkitError)
    fields = problem.get("fields")
    if isinstance(fields, Mapping):
        try:
            given = {name: fields[name] for name in found.fields if name in fields}
            if isinstance(cause := given.get("cause"), Mapping):
                given["cause"] = msgspec.convert(cause, Cause)
            return found(**given)
        except (AttributeError, TypeError, ValueError, msgspec.MsgspecError):
            pass
    return EnvkitError(detail)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside an exception group, at any depth. If `error` is not a group, yield `error` itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
