"""Error classes: one for each kind of error that a caller may want to handle separately.

Each class has a wire `code`, an HTTP `status` and a `retry` flag. Constructor arguments are stored as attributes, whose
names are in `fields`, so that errors can be pickled and sent over the wire (`to_problem`, `from_problem`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

from envkit.types.sandboxes import Cause, CauseKind


class EnvkitError(Exception):
    """Base class of all errors that envkit raises on purpose.

    Attributes:
        detail: One-sentence message: what is wrong, where, and what to do.
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
        problems: One line per problem, each starting with its key.
    """

    code = "config"
    status = 422
    fields = ("problems",)

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class UsageError(EnvkitError):
    """A path, port, model or folder that cannot be used; the message gives the remedy."""

    code = "usage"
    status = 422


class UnknownEnvError(EnvkitError):
    """No environment is registered under this id.

    Attributes:
        env_id: The requested id.
        known: The ids that exist.
        hint: The remedy, if it is not obvious; may be empty.
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
    """An environment or a sandbox rejects an option.

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
    """A message above the receiver's size limit."""

    code = "too_large"
    status = 413


class UnknownPathError(RequestError):
    """A request for a path that the protocol does not define. A missing session or sandbox has another error."""

    code = "not_found"
    status = 404


class StepOrderError(EnvkitError):
    """A step before reset, after the end of the episode, or with the wrong turn number."""

    code = "step_order"
    status = 409


class SessionNotFoundError(EnvkitError):
    """No session has this id: it was never created, was ended, or expired."""

    code = "session_not_found"
    status = 404


class SessionConflictError(EnvkitError):
    """The session's id is in use for another task, or this turn was already played with another action."""

    code = "session_conflict"
    status = 409


class SessionBrokenError(EnvkitError):
    """A step was cancelled or failed, so the state of the session is unknown and its episode cannot continue."""

    code = "session_broken"
    status = 410


class CapacityError(EnvkitError):
    """No capacity is free now; the same call may succeed later."""

    code = "no_capacity"
    status = 503
    retry = True


class LeaseNotPersistedError(EnvkitError):
    """The server cannot write a new lease to its disk, which may be full, and therefore does not grant the lease.

    The same call may succeed once the operator has freed space.
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
    """The tenant exceeded its request rate; a later retry may succeed.

    Attributes:
        wait_s: Seconds to wait before the retry.
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


class EnvError(EnvkitError):
    """The environment raised an exception: a bug in the environment, not a mistake of the agent.

    Attributes:
        env_id: Id of the environment.
        cause: Class of the exception, the method that raised it, and the message.
        place: ``FILE:LINE`` in the environment's own code; empty if unknown.
        trace: The traceback, with several lines; empty if unknown.
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
        """Return the error for remote callers, without the traceback and the folder of the file."""
        return EnvError(self.env_id, self.cause, self.place.rpartition("/")[2])


class EnvRejectedError(EnvkitError):
    """New episodes of an environment are rejected, because its episodes killed too many sandboxes.

    Attributes:
        env_id: Id of the environment.
        losses: Number of sandboxes that its episodes killed within the window.
        window_s: Length of the window, seconds.
        cause: Cause of the last loss.
        wait_s: Seconds until a new episode may start.
    """

    code = "env_rejected"
    status = 429
    fields = ("env_id", "losses", "window_s", "cause", "wait_s")

    def __init__(self, env_id: str, losses: int, window_s: float, cause: str, wait_s: float) -> None:
        super().__init__(
            f"{env_id} is rejected: its episodes killed {losses} sandboxes within {window_s:g} s (last: {cause}); "
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
    """This machine or backend does not support the operation; a retry does not help."""

    code = "unsupported"
    status = 501


class SearchLimitError(EnvkitError):
    """A search reached its limit without a result; a larger limit may find one."""

    code = "search_limit"
    status = 422


class SandboxError(EnvkitError):
    """A problem with a sandbox itself, not with the code that runs in it."""

    code = "sandbox"


class SandboxStartError(SandboxError):
    """The sandbox never became ready.

    Attributes:
        sandbox_id: Id of the sandbox.
        cause: The cause; a string means a cause of the kind ``start_failed``.
    """

    code = "sandbox_start"
    status = 503
    fields: ClassVar[tuple[str, ...]] = ("sandbox_id", "cause")

    def __init__(self, sandbox_id: str, cause: Cause | str) -> None:
        super().__init__(f"sandbox {sandbox_id} did not start: {cause}")
        self.sandbox_id = sandbox_id
        self.cause = Cause(CauseKind.START_FAILED, cause) if isinstance(cause, str) else cause


class SandboxRefusedError(SandboxStartError):
    """The sandbox was not started because the request cannot be granted; a retry does not help.

    Attributes:
        everywhere: True if no backend would grant it, False if only this backend on this machine refuses.
    """

    code = "sandbox_refused"
    status = 422
    fields = ("sandbox_id", "cause", "everywhere")

    def __init__(self, sandbox_id: str, cause: Cause | str, everywhere: bool = False) -> None:
        super().__init__(sandbox_id, cause)
        self.everywhere = everywhere


class SandboxEndedError(SandboxStartError):
    """The sandbox ended before it was ready, because of its own spec; the node is not at fault.

    Its command exited, its time to live passed, its files did not fit, or its start timeout or memory limit is too
    small for anything to start.
    """

    code = "sandbox_ended"
    status = 422


class SandboxLostError(SandboxError):
    """The sandbox was healthy and has ended; everything that ran in it is void.

    Attributes:
        sandbox_id: Id of the lost sandbox.
        cause: The cause of the loss.
    """

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
    """The id belongs to a sandbox with another spec, or the idempotency key was used for another call."""

    code = "sandbox_conflict"
    status = 409


class ImpossibleSandboxError(SandboxError):
    """The request exceeds the capacity of every node of the fleet, even if empty; the message names the resource."""

    code = "sandbox_impossible"
    status = 422


class SnapshotLimitError(SandboxError):
    """The limit on the number or size of snapshots is reached; remove one first."""

    code = "snapshot_limit"
    status = 409


class MissingFileError(SandboxError):
    """The sandbox has no such file or folder."""

    code = "missing_file"
    status = 404


class RefusedFileError(SandboxError):
    """Reading or writing a file in the sandbox was refused: permissions, a full disk, a link that leads outside."""

    code = "refused_file"
    status = 403


_LONGEST = 200
"""Number of characters of a word that `did_you_mean` compares; it ignores the rest to save time."""


def did_you_mean(word: str, known: Iterable[str], *, lists: bool = True) -> str:
    """Return a hint to append to an error about the unknown `word`: ``"; did you mean 'x'?"`` with the closest name.

    If no name is close, the hint lists all `known` names, or is empty if `lists` is false.
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


def _plain(value: object) -> object:
    return value.plain() if isinstance(value, Cause) else value


def _rebuilt(value: object) -> Any:
    return Cause.of(value) if isinstance(value, Mapping) else value


def to_problem(error: EnvkitError) -> dict[str, object]:
    """Return the error as an RFC 9457 problem for the wire, without a stack trace."""
    return {
        "type": error.code,
        "title": type(error).__name__,
        "status": error.status,
        "detail": str(error),
        "retry": error.retry,
        "fields": {name: _plain(getattr(error, name)) for name in error.fields},
    }


def from_problem(problem: Mapping[str, object]) -> EnvkitError:
    """Rebuild an error from the wire. An unknown code or invalid fields give a plain `EnvkitError`.

    The peer cannot cause imports, because `type` only selects from the classes in this module.
    """
    detail = str(problem.get("detail", "the server reported an error without details"))
    found = next((one for one in _classes(EnvkitError) if one.code == problem.get("type")), EnvkitError)
    fields = problem.get("fields")
    if isinstance(fields, Mapping):
        try:
            return found(**{name: _rebuilt(fields[name]) for name in found.fields if name in fields})
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
    return EnvkitError(detail)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside an exception group, at any depth. If `error` is not a group, yield `error` itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
