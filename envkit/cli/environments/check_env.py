"""``envkit check-env``: check that an environment behaves as training and serving expect."""

from __future__ import annotations

from typing import Annotated

import typer

from envkit.cli.environments.options import EnvId, EnvOptions, read_options
from envkit.cli.exits import FAILED
from envkit.cli.tables import print_table


def check_env(
    env_id: EnvId,
    option: EnvOptions = None,
    episodes: Annotated[int, typer.Option(min=2, metavar="COUNT", help="Number of seeds that most checks play.")] = 5,
) -> None:
    """Check your own environment for mistakes.

    Prints one line per check: what was observed, or what is wrong and how to fix it. Exits with 1 if a check fails.
    """
    from rich.console import Console

    from envkit.checks import check_env

    with Console(stderr=True).status(f"checking {env_id}") as status:
        verdicts = check_env(
            env_id,
            options=read_options(option or ()),
            episodes=episodes,
            on_check=lambda name: status.update(f"checking {env_id}: {name}"),
        )
    print_table(("CHECK", "VERDICT", "SEEN"), [(one.check, one.outcome, one.seen) for one in verdicts])
    if any(one.outcome == "fail" for one in verdicts):
        raise typer.Exit(FAILED)
