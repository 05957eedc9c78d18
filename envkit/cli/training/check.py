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

    Prints ok, or one line for each problem, starting with its key. It asks no network: whether the hub has a model that
    is not on this machine is not known before training.
    """
    from envkit import clock, config
    from envkit.wiring.training import checks

    run = config.load(file, overrides or ())
    problems = [*checks.check(run), *clock.run(checks.check_docker, run)]
    if problems:
        raise ConfigError(problems)
    for line in checks.unverified(run):
        typer.echo(line, err=True)
    typer.echo("ok")
