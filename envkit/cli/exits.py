"""Conversion of errors to exit codes: 1 for a failure, 2 for an invalid request, 130 for an interrupt."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from envkit.cli.tables import echo
from envkit.errors import (
    ConfigError,
    EnvkitError,
    OptionError,
    SandboxRefusedError,
    UnknownEnvError,
    UsageError,
    leaves,
)
from envkit.installation import explain

FAILED = 1
REFUSED = 2
STOPPED = 130


@contextmanager
def as_exit_code() -> Iterator[None]:
    """Print each error that a ``with`` block raises as one line, and exit. A bug in envkit is raised with traceback."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # a stream is None if the caller closed it
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if sys.stdout is not None:
            # Redirect the stream. Otherwise Python would flush it again at exit, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:  # a broken pipe is normal: the reader, such as `head`, has read enough
            echo(f"{error.strerror}; free some space", err=True)
        sys.exit(FAILED)
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        report = _report(list(leaves(error)))
        if report is None:
            raise
        lines, code = report
        for line in lines:
            echo(line, err=True)
        sys.exit(code)


def _report(errors: Sequence[BaseException]) -> tuple[Sequence[str], int] | None:
    """Return the lines to print for `errors`, and the exit code; None if one is a bug, which needs its traceback."""
    lines: dict[str, None] = {}
    code = REFUSED
    for error in errors:
        if isinstance(error, KeyboardInterrupt):
            return (), STOPPED
        if isinstance(error, ConfigError):
            lines.update(dict.fromkeys(" ".join(line.split()) for line in error.problems))
        elif isinstance(error, EnvkitError):
            lines[" ".join(str(error).split())] = None
            if not isinstance(error, (UsageError, UnknownEnvError, OptionError, SandboxRefusedError)):
                code = FAILED
        elif isinstance(error, ImportError) and (line := explain(error)) is not None:
            lines[line] = None
        else:
            return None
    return tuple(lines), code
