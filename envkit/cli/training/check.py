"""``envkit check``: check a training file without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.tables import echo
from envkit.errors import ConfigError

if TYPE_CHECKING:
    pass

File = Annotated[Path, typer.Argument(metavar="FILE", help="A training file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key of the file, such as trainer.steps=10; repeatable."
    ),
]


def check(file: File, overrides: Overrides = None) -> None:
    """Check a training file without running it.

    Prints "ok", or one line per problem, starting with its key. Asks the server of env.url, but uses no other network:
    if the model is not on this machine, the check cannot find out whether it exists on the Hugging Face hub.
    """
    from envkit import clock, config
    from envkit.wiring.training import checks, remote

    run = config.load(file, overrides or ())
    problems = [*checks.check(run), *clock.run(checks.check_docker, run), *clock.run(remote.check_server, run)]
    if problems:
        raise ConfigError(problems)
    for line in checks.unverified(run):
        echo(line, err=True)
    echo("ok")
