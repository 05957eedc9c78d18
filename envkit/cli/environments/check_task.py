"""``envkit check-task``: check tasks with the players of their environment."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from envkit.cli.environments.options import EnvOptions, read_options
from envkit.cli.exits import FAILED
from envkit.cli.tables import print_table


def check_task(
    env_id: Annotated[str, typer.Argument(metavar="ENV", help="A registered environment; see envkit list.")],
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
    backend: Annotated[
        str | None,
        typer.Option(metavar="auto|local|docker|process", help="Sandboxes of an environment that uses them as tools."),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(metavar="MODEL@URL", help="Judge of an environment that needs one.")
    ] = None,
) -> None:
    """Check tasks by playing them: the nop must fail, the oracle must succeed, and each cheat must earn 0.

    Prints one line per player, and one for each task in which a player did not do what it must, with the end of the
    grader's log, if the environment has one. Then it exits with 1.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from envkit.checks.tasks import EXPECTED, check_tasks

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"checking {env_id}", total=None)
        results, missing = check_tasks(
            env_id,
            index or None,
            tasks=tasks,
            split=split,
            repeat=repeat,
            options=read_options(option or ()),
            backend=backend,
            judge=judge,
            announce=lambda line: console.print(line, markup=False, highlight=False),
            on_begin=lambda count: progress.update(bar, total=count),
            on_episode=lambda player: progress.advance(bar),
        )
    problems = [line for one in results for line in one.problems()]
    print_table(
        ("PLAYER", "EPISODES", "SUCCESS", "VERDICT"),
        [
            (one.player, str(len(one.episodes)), str(one.successes), "fail" if one.problems() else "ok")
            for one in results
        ],
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
