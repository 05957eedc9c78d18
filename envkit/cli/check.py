"""``envkit check``: whether a training file can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envkit.errors import ConfigError

File = Annotated[Path, typer.Argument(metavar="FILE", help="A training file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the file, such as trainer.steps=10."),
]


def check(file: File, overrides: Overrides = None) -> None:
    """Check a training file without running it.

    Prints ok, or one line for each problem, starting with its key.
    """
    from envkit import config
    from envkit.wiring import checks

    problems = checks.check(config.load(file, overrides or ()))
    if problems:
        raise ConfigError(problems)
    typer.echo("ok")
