"""``envkit list``: the registered environments, or one of them."""

from __future__ import annotations

import json
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
