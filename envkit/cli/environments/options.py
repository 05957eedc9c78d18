"""Options of an environment on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from envkit.errors import UsageError

if TYPE_CHECKING:
    from envkit.types import JSON

EnvOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Set an option of the environment, such as size=6; repeatable."),
]


def read_options(words: Sequence[str]) -> dict[str, JSON]:
    """Return the options in ``key=value`` words. Each value is read as YAML.

    Raises:
        UsageError: A word is not ``key=value``, or its value is not YAML.
    """
    import yaml

    options: dict[str, JSON] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise UsageError(f"--option {word}: must have the form key=value, such as size=6")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"--option {word}: {value!r} is not YAML") from None
    return options
