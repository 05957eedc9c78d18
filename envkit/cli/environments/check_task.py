"""``envkit check-task``: check tasks with the players of their environment."""

from __future__ import annotations

import sys
from contextlib import closing
from importlib.util import find_spec
from typing import Annotated

import typer

from envkit.cli.environments.options import Backend, EnvId, EnvOptions, Judge, read_options
from envkit.cli.exits import FAILED
from envkit.cli.tables import print_table


def check_task(
    env_id: EnvId,
    index: Annotated[
        list[int] | None, typer.Argument(metavar="TASK", min=0, help="Indices of tasks; by default the first ones.")
    ] = None,
    tasks: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Number of tasks, if no TASK is given. The option of a folder is --option tasks=DIR.",
        ),
    ] = 5,
    split: Annotated[str, typer.Option(metavar="SPLIT", help="Split of the tasks.")] = "eval",
    repeat: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Episodes of the oracle per task.")] = 20,
    option: EnvOptions = None,
    backend: Backend = None,
    judge: Judge = None,
) -> None:
    """Check tasks by playing them: the nop must fail, the oracle must succeed, and each cheat must earn 0.

    Prints one line per player, and one for each task in which a player did not do what it must, with the end of the
    grader's log, if the environment has one. Then it exits with 1.
    """
    from envkit.checks.tasks import EXPECTED, check_tasks
    from envkit.runs.display import display_on

    options = read_options(option or ())
    with closing(display_on(sys.stderr)) as display:
        results, missing = check_tasks(
            env_id,
            index or tasks,
            split=split,
            repeat=repeat,
            options=options,
            backend=backend,
            judge=judge,
            display=display,
        )
    problems = [line for one in results for line in one.problems()]
    print_table(
        ("PLAYER", "EPISODES", "SUCCESS", "VERDICT"),
        [(one.player, str(len(one.episodes)), str(one.successes), one.verdict) for one in results],
    )
    has_cheats = find_spec("envkit_cheats") is not None
    for kind in missing if has_cheats else [kind for kind in missing if kind != "cheat"]:
        typer.echo(f"{env_id} has no player {kind}, which {EXPECTED[kind]}")
    if not has_cheats:
        typer.echo('the cheats of envkit were not played; to install them: pip install "envkit[cheats]"')
    for line in problems:
        typer.echo(line)
    if problems:
        raise typer.Exit(FAILED)
