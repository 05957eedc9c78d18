"""Errors to exit codes, in one place: 1 something failed, 2 something was asked for that cannot be, 130 interrupted."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from envkit.errors import ConfigError, EnvkitError, OptionError, SandboxRefusedError, UnknownEnvError, UsageError
from envkit.installation import explain

FAILED = 1
REFUSED = 2
STOPPED = 130


@contextmanager
def as_exit_code() -> Iterator[None]:
    """End the process with a line for each error of the block that is not a fault of the program itself."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it is when it was closed before we began
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries once more as it ends
        if error.errno == errno.ENOSPC:  # a broken pipe only says that the reader, such as `head`, has seen enough
            print(f"{error.strerror}; free some space", file=sys.stderr)
        sys.exit(FAILED)
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        told = _told(_leaves(error))
        if told is None:
            raise
        lines, code = told
        for line in lines:
            print(line, file=sys.stderr)
        sys.exit(code)


def _told(errors: Sequence[BaseException]) -> tuple[Sequence[str], int] | None:
    """Return what to say about `errors` and the exit code; None when one of them deserves its traceback."""
    lines: dict[str, None] = {}
    code = REFUSED
    for error in errors:
        if isinstance(error, KeyboardInterrupt):
            return (), STOPPED
        if isinstance(error, ConfigError):
            lines.update(dict.fromkeys(error.problems))
        elif isinstance(error, EnvkitError):
            lines[" ".join(str(error).split())] = None
            if not isinstance(error, (UsageError, UnknownEnvError, OptionError, SandboxRefusedError)):
                code = FAILED
        elif isinstance(error, ImportError) and (line := explain(error)) is not None:
            lines[line] = None
        else:
            return None
    return tuple(lines), code


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
