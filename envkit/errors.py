"""Errors: one class for each thing that a caller would handle differently.

    EnvkitError
    |-- ConfigError              a file or an option says something that cannot be
    |-- UsageError               a path, port or folder cannot be used as asked
    |-- UnknownEnvError          no environment has this id
    |-- OptionError              an environment refuses an option
    |-- RequestError             a message that the protocol does not allow
    |   |-- TooLargeError        one that is larger than the receiver takes
    |   `-- UnknownPathError     one for a path at which there is nothing
    |-- StepOrderError           a step before reset, after the end, or out of turn
    |-- SessionNotFoundError     no such session, or it has expired
    |-- SessionConflictError     the id is taken by another task
    |-- SessionBrokenError       a step was cancelled half way; the episode is void
    |-- CapacityError            nothing free now; try again
    |-- UnrecordedError          the server cannot write down now what it would give; try again
    |-- UnauthorizedError        no token, or one that is not valid
    |-- ForbiddenError           a token that does not allow this
    |-- RateLimitError           asked too often; try again after a while
    |-- DeadlineError            the answer did not come in time
    |-- EnvError                 the world itself raised
    |-- UnreachableError         the server does not answer
    |-- UnsupportedError         this cannot be done here, however often it is tried
    |-- OutOfReachError          a bounded search ended before it knew
    `-- SandboxError             something about a sandbox
        |-- SandboxStartError    it never became ready
        |   |-- SandboxRefusedError  what was asked for cannot be granted, however often it is tried
        |   `-- SandboxEndedError  it ended before it was ready, by what was asked for
        |-- SandboxLostError     it was healthy and is gone
        |-- SandboxNotFoundError no sandbox has this id
        |-- SandboxConflictError the id is taken by another spec
        |-- ImpossibleSandboxError   no node could ever hold it
        |-- SnapshotLimitError   there may be no further snapshot until one is removed
        |-- MissingFileError     no such file in it
        `-- RefusedFileError     a file in it may not be read or written so

Each class has a wire `code`, an HTTP `status` and says whether to `retry`. Constructor arguments are kept as
attributes named in `fields`, so that an error survives pickling and the wire (`to_problem`, `from_problem`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from envkit.types.sandboxes import Cause, CauseKind


class EnvkitError(Exception):
    """Anything that envkit raises on purpose.

    Attributes:
        detail: One sentence for people: what was wrong, where, and what to do.
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
    """A configuration that cannot be used.

    Attributes:
        problems: One line for each problem, each starting with its key.
    """

    code = "config"
    status = 422
    fields = ("problems",)

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class UsageError(EnvkitError):
    """A path, port, model or folder that cannot be used as asked; the message says what to do."""

    code = "usage"
    status = 422


class UnknownEnvError(EnvkitError):
    """No environment is registered under this id.

    Attributes:
        env_id: The id that was asked for.
        known: The ids that exist.
        hint: What to do about it, where that is not obvious; may be empty.
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
    """An environment or a sandbox refuses an option.

    Attributes:
        option: Name of the option.
        reason: What is wrong with it.
    """

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
    """A message that is larger than its receiver takes."""

    code = "too_large"
    status = 413


class UnknownPathError(RequestError):
    """A request for a path at which the protocol has nothing, as opposed to a session or sandbox that is not there."""

    code = "not_found"
    status = 404


class StepOrderError(EnvkitError):
    """A step before reset, after the end of the episode, or with the wrong turn number."""

    code = "step_order"
    status = 409


class SessionNotFoundError(EnvkitError):
    """No session has this id: it was never made, was ended, or expired because nobody used it."""

    code = "session_not_found"
    status = 404


class SessionConflictError(EnvkitError):
    """The session's id is in use for another task, or its turn was played with another action."""

    code = "session_conflict"
    status = 409


class SessionBrokenError(EnvkitError):
    """A step was cancelled or failed half way, so the session's state is not known; the episode is void."""

    code = "session_broken"
    status = 410


class CapacityError(EnvkitError):
    """Nothing is free at the moment; the same call may succeed later."""

    code = "no_capacity"
    status = 503
    retry = True


class LeaseNotPersistedError(EnvkitError):
    """The server cannot write down what it would give, and so does not give it; its disk may be full.

    The same call may succeed later, once who runs the server has seen to that.
    """

    code = "lease_not_persisted"
    status = 503
    retry = True

    def __init__(self, detail: str = "the server cannot write down leases now, and so gives none; ask later") -> None:
        super().__init__(detail)


class UnauthorizedError(EnvkitError):
    """The caller gave no token, or one that is not valid."""

    code = "unauthorized"
    status = 401


class ForbiddenError(EnvkitError):
    """The caller's token does not allow this."""

    code = "forbidden"
    status = 403


class RateLimitError(EnvkitError):
    """The caller asks more often than its tenant may; asking again later helps.

    Attributes:
        wait_s: Seconds after which it may ask again.
    """

    code = "rate_limit"
    status = 429
    retry = True
    fields = ("detail", "wait_s")

    def __init__(self, detail: str, wait_s: float = 1.0) -> None:
        super().__init__(detail)
        self.wait_s = wait_s


class DeadlineError(EnvkitError):
    """The answer did not come within the time that the caller gave."""

    code = "deadline"
    status = 504


class EnvError(EnvkitError):
    """The environment raised an exception, which is a fault of the environment and not of the player.

    Attributes:
        env_id: Id of the environment.
        cause: Class of the exception, method that raised it, and message.
        place: ``FILE:LINE`` of the environment's own code; empty if it is not known.
        trace: The traceback, of several lines; empty if it is not known.
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
        """Return the error without the traceback and the folder of the file, which remote callers need not know."""
        return EnvError(self.env_id, self.cause, self.place.rpartition("/")[2])


class UnreachableError(EnvkitError):
    """The server does not answer, or the connection to it broke."""

    code = "unreachable"
    status = 503
    retry = True


class UnsupportedError(EnvkitError):
    """What was asked for cannot be done on this machine or by this backend, however often it is tried."""

    code = "unsupported"
    status = 501


class SearchLimitError(EnvkitError):
    """A search came to its bound before it knew the answer; a larger bound may find it."""

    code = "search_limit"
    status = 422


class SandboxError(EnvkitError):
    """Something about a sandbox, as opposed to what runs in it."""

    code = "sandbox"


class SandboxStartError(SandboxError):
    """The sandbox never became ready.

    Attributes:
        sandbox_id: Id of the sandbox.
        cause: Why; a text stands for a cause of the kind ``start_failed``.
    """

    code = "sandbox_start"
    status = 503
    fields: ClassVar[tuple[str, ...]] = ("sandbox_id", "cause")

    def __init__(self, sandbox_id: str, cause: Cause | str) -> None:
        super().__init__(f"sandbox {sandbox_id} did not start: {cause}")
        self.sandbox_id = sandbox_id
        self.cause = Cause(CauseKind.START_FAILED, cause) if isinstance(cause, str) else cause


class SandboxRefusedError(SandboxStartError):
    """The sandbox was not started, since what was asked for cannot be granted; asking again does not help.

    Attributes:
        everywhere: Whether that holds wherever it is tried, as opposed to one backend on one machine.
    """

    code = "sandbox_refused"
    status = 422
    fields = ("sandbox_id", "cause", "everywhere")

    def __init__(self, sandbox_id: str, cause: Cause | str, everywhere: bool = False) -> None:
        super().__init__(sandbox_id, cause)
        self.everywhere = everywhere


class SandboxEndedError(SandboxStartError):
    """The sandbox ended before it was ready, by what was asked for and not by what it was asked of.

    It came up and its command exited, its time to live was over, or there was no room in it for its files; or it was
    given too little time, or too little memory, for anything to start.
    """

    code = "sandbox_ended"
    status = 422


class SandboxLostError(SandboxError):
    """The sandbox was healthy and is gone; whatever ran in it is void.

    Attributes:
        sandbox_id: Id of the sandbox that died.
        cause: Why.
    """

    code = "sandbox_lost"
    status = 503
    fields = ("sandbox_id", "cause")

    def __init__(self, sandbox_id: str, cause: Cause) -> None:
        super().__init__(f"sandbox {sandbox_id} lost: {cause.detail}")
        self.sandbox_id = sandbox_id
        self.cause = cause


class SandboxNotFoundError(SandboxError):
    """No sandbox has this id: it was never made, was stopped long ago, or belongs to somebody else."""

    code = "sandbox_not_found"
    status = 404


class SandboxConflictError(SandboxError):
    """The sandbox's id is taken by one with another spec, or a call's key by another call."""

    code = "sandbox_conflict"
    status = 409


class ImpossibleSandboxError(SandboxError):
    """No node of the fleet could ever hold it, however long one waited; says which bound is too much."""

    code = "sandbox_impossible"
    status = 422


class SnapshotLimitError(SandboxError):
    """There are as many snapshots as there may be, or they are as large; one has to be removed first."""

    code = "snapshot_limit"
    status = 409


class MissingFileError(SandboxError):
    """There is no such file or folder in the sandbox."""

    code = "missing_file"
    status = 404


class RefusedFileError(SandboxError):
    """A file in the sandbox may not be read or written so: permissions, a full disk, a link that leads out."""

    code = "refused_file"
    status = 403


_LONGEST = 200
"""Of a word that is looked for, since looking takes more time the longer it is."""


def did_you_mean(word: str, known: Iterable[str], *, lists: bool = True) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of `known`, else, if it `lists` them, what there is."""
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


def _plain(value: object) -> object:
    return value.plain() if isinstance(value, Cause) else value


def _rebuilt(value: object) -> Any:
    return Cause.of(value) if isinstance(value, Mapping) else value


def to_problem(error: EnvkitError) -> dict[str, object]:
    """Return the error as an RFC 9457 problem: what goes over the wire, without a stack."""
    return {
        "type": error.code,
        "title": type(error).__name__,
        "status": error.status,
        "detail": str(error),
        "retry": error.retry,
        "fields": {name: _plain(getattr(error, name)) for name in error.fields},
    }


def from_problem(problem: Mapping[str, object]) -> EnvkitError:
    """Rebuild an error from the wire; an unknown code or odd fields give a plain `EnvkitError`.

    Nothing that the other side names is imported: `type` only selects from the classes in this module.
    """
    detail = str(problem.get("detail", "the server reported an error without saying which"))
    found = next((one for one in _classes(EnvkitError) if one.code == problem.get("type")), EnvkitError)
    fields = problem.get("fields")
    if isinstance(fields, Mapping):
        try:
            return found(**{name: _rebuilt(fields[name]) for name in found.fields if name in fields})
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
    return EnvkitError(detail)
