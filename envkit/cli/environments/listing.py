"""``envkit list`` and ``envkit data``: the registered environments, and their data."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from envkit.cli.environments.options import complete_env
from envkit.cli.tables import echo, print_table


def list_envs(
    env_id: Annotated[
        str | None,
        typer.Argument(metavar="ENV", autocompletion=complete_env, help="Show the options of this environment."),
    ] = None,
) -> None:
    """List the registered environments, or what one of them has: splits, players, needs, data and options."""
    from envkit.registry import option_defaults
    from envkit.wiring.environments import find, registered
    from envkit.wiring.evaluation.policies import players
    from envkit.wiring.tasks import splits

    if env_id is None:
        specs = registered()
        width = max((len(spec.id) for spec in specs), default=0)
        for spec in specs:
            echo(f"{spec.id:<{width}}  {spec.summary}".rstrip())
        return
    spec = find(env_id)
    echo(f"{spec.id}  {spec.summary}".rstrip())
    facts = {"splits": splits(spec, {}), "players": players(spec), "needs": sorted(spec.needs), "data": spec.data}
    for name, values in facts.items():
        if values:
            echo(f"{name}: {', '.join(values)}")
    if options := option_defaults(spec):
        echo("")
        print_table(("OPTION", "DEFAULT"), [(name, json.dumps(value, default=str)) for name, value in options.items()])


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
