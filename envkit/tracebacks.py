"""Where an environment raised: an exception of its code as an `EnvError` with file, line and traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

from envkit.errors import (
    ConfigError,
    EnvError,
    EnvkitError,
    OptionError,
    SandboxError,
    StepOrderError,
    UnknownEnvError,
    UsageError,
)

_MAX_TRACE = 8192
"""Characters of a traceback that are kept; the end says most."""

_SPOKEN_BY_ENVS = (ConfigError, EnvError, OptionError, SandboxError, StepOrderError, UnknownEnvError, UsageError)
"""What an environment raises on purpose: about the caller's request, or about its own sandbox."""

_SANDBOX_CODE = ("envkit.wiring.", "envkit.sandbox.")
_BETWEEN = {"anyio", "envkit", "gymnasium"} | sys.stdlib_module_names
"""Top-level packages that lie between a player and an environment."""


def env_error(error: Exception, env_id: str, call: str) -> EnvkitError:
    """Return the error of an environment that raised `error`.

    What it raised on purpose about the caller's request stays as it is. A sandbox that the environment could not open
    is a fault of the environment and not of its caller.

    Args:
        error: The exception, with its traceback.
        env_id: Id of the environment.
        call: The method that raised: ``"reset"``, ``"step"``, ``"render"`` or ``"__init__"``.
    """
    frames = list(_frames(error))
    raised_in = _module(frames[-1][0]) if frames else ""
    is_about_request = not (isinstance(error, (ConfigError, UsageError)) and raised_in.startswith(_SANDBOX_CODE))
    if isinstance(error, _SPOKEN_BY_ENVS) and is_about_request:
        return error
    trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
    return EnvError(env_id, f"{type(error).__name__} in {call}: {error}", _place(frames), trace)


def _place(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Return ``FILE:LINE`` of the innermost frame of the environment's own code; empty if there is none.

    Its own are its package, and files that are not installed; a library that it calls is not.
    """
    own = [(frame, line) for frame, line in frames if _is_env_code(_module(frame))]
    for frame, line in reversed(own):
        file = frame.f_code.co_filename
        if _package(_module(frame)) == _package(_module(own[0][0])) or "site-packages" not in file:
            return f"{file}:{line}"
    return ""


def _frames(error: Exception) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of the traceback, outermost first, with the line in each."""
    return traceback.walk_tb(error.__traceback__)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_env_code(module: str) -> bool:
    return module.startswith("envkit.environments.") or _package(module) not in _BETWEEN
