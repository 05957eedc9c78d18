"""What a program can be given: texts without NUL, and finite numbers. Types are looked at because callers have none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LONGEST_S = 1e9
MOST_BYTES = 1 << 32


def fault_of_words(words: Iterable[object]) -> str | None:
    """Return why `words` cannot be a program and its arguments; None when they can."""
    for word in words:
        if not isinstance(word, str):
            return f"{word!r} is no text"
        if "\0" in word:
            return f"{word!r} holds NUL"
    return None


def fault_of_variables(variables: Mapping[str, str]) -> str | None:
    """Return why `variables` cannot be an environment; None when they can."""
    settings: list[tuple[object, object]] = [*variables.items()]
    for name, value in settings:
        if (fault := fault_of_words((name, value))) is not None:
            return fault
        if not name or "=" in str(name):
            return f"a variable cannot have the name {name!r}"
    return None


def check_bounds(timeout_s: object, max_output_bytes: object) -> None:
    """Raise `ValueError` unless a command has finite bounds."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s <= LONGEST_S:
        raise ValueError(f"timeout_s must be a number of seconds from 0 to {LONGEST_S:g}, got {timeout_s!r}")
    if type(max_output_bytes) is not int or not 0 <= max_output_bytes <= MOST_BYTES:
        raise ValueError(f"max_output_bytes must be an integer from 0 to {MOST_BYTES}, got {max_output_bytes!r}")
