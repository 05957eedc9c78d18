"""``envkit check``: check a training file without running it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.tables import echo
from envkit.errors import ConfigError

if TYPE_CHECKING:
    from envkit.config import RunConfig

File = Annotated[Path, typer.Argument(metavar="FILE", help="A training file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key of the file, such as trainer.steps=10; repeatable."
    ),
]


def load(file: Path, overrides: Sequence[str]) -> RunConfig:
    """Read a training file. If it is invalid, the error also names wrong options of its environments."""
    from envkit import config

    try:
        return config.load(file, overrides)
    except ConfigError as error:
        from envkit.wiring.training.checks import env_problems

        raise ConfigError(dict.fromkeys([*error.problems, *env_problems(file, overrides)])) from None


def check(file: File, overrides: Overrides = None) -> None:
    """Check a training file without running it.

    Prints "ok", or one line per problem, starting with its key. Asks the server of env.url, but uses no other network:
    if the model is not on this machine, the check cannot find out whether it exists on the Hugging Face hub.
    """
    from envkit import clock
    from envkit.wiring.training import checks, remote

    run = load(file, overrides or ())
    problems = [*checks.check(run), *clock.run(checks.check_docker, run), *clock.run(remote.check_server, run)]
    if problems:
        raise ConfigError(problems)
    for line in checks.unverified(run):
        echo(line, err=True)
    echo("ok")
