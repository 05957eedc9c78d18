"""Options of an environment: overriding them, and checking their values.

An environment keeps its options in a frozen dataclass. The dataclass calls the checks below in ``__post_init__``,
so constructors, ``reset(options=...)`` and task files all reject invalid values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

from envkit.errors import OptionError, did_you_mean

from .split import SPLITS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    OptionsT = TypeVar("OptionsT", bound=DataclassInstance)


def override(options: OptionsT, changes: Mapping[str, object] | None) -> OptionsT:
    """Return a copy of `options` in which `changes` override the values.

    Raises:
        OptionError: A name is unknown (the message suggests the most similar one), or a value is invalid.
    """
    if not changes:
        return options
    known = [field.name for field in fields(options)]
    for name in changes:
        if name not in known:
            raise OptionError(str(name), f"no such option{did_you_mean(str(name), known)}")
    return replace(options, **changes)


def override_known(options: OptionsT, changes: Mapping[str, object]) -> OptionsT:
    """Do as `override`, but ignore the names in `changes` that are not fields of `options`.

    Raises:
        OptionError: A value is invalid.
    """
    known = {field.name for field in fields(options)}
    return override(options, {name: value for name, value in changes.items() if name in known})


def check_integer(name: str, value: object, *, low: int, high: int) -> None:
    """Raise `OptionError` unless `value` is an integer from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise OptionError(name, f"must be an integer from {low} to {high}, got {value!r}")


def check_number(name: str, value: object, *, low: float, high: float) -> None:
    """Raise `OptionError` unless `value` is a finite number from `low` to `high`."""
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        raise OptionError(name, f"must be a number from {low} to {high}, got {value!r}")


def check_boolean(name: str, value: object) -> None:
    """Raise `OptionError` unless `value` is true or false."""
    if type(value) is not bool:
        raise OptionError(name, f"must be true or false, got {value!r}")


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Raise `OptionError` unless `value` is in `known`; the message suggests the most similar name."""
    if not isinstance(value, str) or value not in known:
        raise OptionError(name, f"{value!r} is not a known value{did_you_mean(str(value), known)}")


def check_split(value: object) -> None:
    """Raise `OptionError` unless the option ``split`` is None or the name of a split."""
    if value is not None:
        check_choice("split", value, SPLITS)


def check_image(value: object) -> None:
    """Raise `OptionError` unless the option ``image`` is None or the name of an image."""
    if value is not None and not isinstance(value, str):
        raise OptionError("image", f"must be the name of an image, got {value!r}")


def check_path(name: str, value: object) -> None:
    """Raise `OptionError` unless `value` is None or a path given as a string, since JSON cannot represent a `Path`."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        hint = f"; use {str(value)!r}" if isinstance(value, PathLike) else ""
        raise OptionError(name, f"must be the path of a file or folder, as a string, got {value!r}{hint}")


def check_symbols(name: str, value: object, *, instead_of: str) -> None:
    """Raise `OptionError` unless `value` has a different printable character for each character of `instead_of`."""
    if (
        not isinstance(value, str)
        or len(value) != len(instead_of)
        or len(set(value)) != len(value)
        or not value.isprintable()
        or " " in value
    ):
        raise OptionError(
            name,
            f"must be {len(instead_of)} different printable characters without spaces, to show instead of "
            f"{instead_of} in this order, got {value!r}",
        )


def check_range(name: str, value: object, *, low: int, high: int) -> None:
    """Raise `OptionError` unless `value` is two integers from `low` to `high`, the first not above the second."""
    if (
        not isinstance(value, (list, tuple))
        or [type(one) for one in value] != [int, int]
        or not low <= value[0] <= value[1] <= high
    ):
        raise OptionError(
            name,
            f"must be two integers from {low} to {high}, the smaller one first, such as [{low}, {high}], got {value!r}",
        )
