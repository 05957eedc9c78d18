"""Validate arguments, environment variables and limits of commands, including types that callers did not check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_MAX_TIMEOUT_S = 1e9
_MAX_OUTPUT_BYTES = 1 << 32


def fault_of_words(words: Iterable[object]) -> str | None:
    """Return why `words` cannot be a program and its arguments; None if they are valid."""
    for word in words:
        if not isinstance(word, str):
            return f"{word!r} is not a string"
        if "\0" in word:
            return f"{word!r} contains a NUL character"
    return None


def fault_of_variables(variables: Mapping[str, str]) -> str | None:
    """Return why `variables` cannot be environment variables; None if they are valid."""
    settings: list[tuple[object, object]] = [*variables.items()]
    for name, value in settings:
        if (fault := fault_of_words((name, value))) is not None:
            return fault
        if not name or "=" in str(name):
            return f"{name!r} is not a valid variable name"
    return None


def check_bounds(timeout_s: object, max_output_bytes: object) -> None:
    """Raise `ValueError` unless the timeout and the output limit of a command are numbers in their allowed ranges."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s <= _MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s must be a number of seconds from 0 to {_MAX_TIMEOUT_S:g}, got {timeout_s!r}")
    if type(max_output_bytes) is not int or not 0 <= max_output_bytes <= _MAX_OUTPUT_BYTES:
        raise ValueError(f"max_output_bytes must be an integer from 0 to {_MAX_OUTPUT_BYTES}, got {max_output_bytes!r}")
