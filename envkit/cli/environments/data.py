"""``envkit data``: list and build the data of environments."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from envkit.cli.tables import echo, print_table


def data(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The data to build; by default, list all.")] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="PATH", help="Your files, for data that is made from files.", exists=True),
    ] = None,
) -> None:
    """List the data that environments need, or build it and print its folder. Needed only once per machine."""
    from envkit.errors import UsageError
    from envkit.runs.display import StreamDisplay
    from envkit.wiring import data as of_envs

    if name is None:
        if source is not None:
            raise UsageError("--from needs the name of the data to build, such as webshop-files")
        rows = [
            (one, env_id, "yes" if of_envs.folder_of(one).is_dir() else "no", str(of_envs.folder_of(one)))
            for one, (env_id, _) in sorted(of_envs.builders().items())
        ]
        if not rows:
            echo("no registered environment needs data")
            return
        print_table(("NAME", "ENVIRONMENT", "BUILT", "FOLDER"), rows)
        return
    with closing(StreamDisplay(sys.stderr)) as display:
        if not of_envs.build(name, display.announce, source):
            display.announce(f"{name} is already on this machine")
    echo(of_envs.folder_of(name))
