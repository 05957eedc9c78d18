"""``envkit terminal``: list, check and export tasks of Terminal-v0, and build their images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envkit.cli.exits import FAILED
from envkit.cli.tables import print_table
from envkit.cli.tasks.progress import progress_bar

app = typer.Typer(
    no_args_is_help=True, help="List, check, build and export tasks of Terminal-v0.", rich_markup_mode=None
)

_Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Names of tasks; by default all.")]


@app.command("ls")
def list_tasks() -> None:
    """List the tasks that envkit has, and the families of generated tasks."""
    from envkit.wiring import terminal

    rows = [
        (task.folder.name, task.difficulty, task.profile, " ".join(task.programs) or "-")
        for task in terminal.tasks_of()
    ]
    print_table(("TASK", "DIFFICULTY", "PROFILE", "PROGRAMS"), rows)
    typer.echo("")
    print_table(
        ("FAMILY", "HELD OUT", "TASKS, DIFFICULTY 1 TO 5"),
        [(one.name, "yes" if one.held_out else "no", one.summary) for one in terminal.FAMILIES.values()],
    )


@app.command()
def build(
    name: _Names = None,
    tasks: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, metavar="DIR", help="Folder of tasks; by default those of envkit."),
    ] = None,
    base: Annotated[str | None, typer.Option(metavar="IMAGE", help="Base image of Dockerfiles with ARG BASE.")] = None,
) -> None:
    """Build the Docker images that do not exist yet, by default those of envkit's own and generated tasks. A build uses
    the network of this machine.
    """
    from envkit.wiring import terminal

    chosen = terminal.tasks_of(name or (), tasks)
    if not name and tasks is None:
        chosen += terminal.family_tasks()
    done: list[str] = []
    with progress_bar("building", terminal.image_count(chosen)) as (announce, move):

        def on_image(one: terminal.Built) -> None:
            done.append(one.tag)
            move(len(done))

        built = terminal.build(chosen, base=base, announce=announce, on_image=on_image)
    rows = [
        (one.tag, "exists" if one.seconds is None else f"{one.seconds:.1f} s", ", ".join(one.tasks)) for one in built
    ]
    if rows:
        print_table(("IMAGE", "BUILD", "TASKS"), rows)
    for image in sorted({task.image for task in chosen if task.image}):
        typer.echo(f"{image} is not built here: docker pull {image}")


@app.command()
def check(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, metavar="DIR", help="Task, or folder of tasks.")
    ],
) -> None:
    """Check folders of tasks, of Harbor or Terminal-Bench 1: print what envkit does not support, and which tests need
    the network. Exit with 1 if a task cannot be read.
    """
    from envkit.wiring import terminal

    found = terminal.check(folder)
    for one in found:
        state = "cannot be read" if one.problems else "ok" if not one.notes else "ok, but:"
        typer.echo(f"{one.folder.name}: {state}")
        for line in (*one.problems, *one.notes):
            typer.echo(f"  {line}")
    failed = sum(bool(one.problems) for one in found)
    typer.echo(f"{len(found) - failed} of {len(found)} tasks can be read")
    if failed:
        raise typer.Exit(FAILED)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(file_okay=False, metavar="DIR", help="Folder to write.")],
    name: _Names = None,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write generated tasks of this family instead.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Seeds of generated tasks, from A to B - 1.", show_default="0:10"),
    ] = None,
    difficulty: Annotated[
        int | None, typer.Option(min=1, max=5, metavar="N", help="Difficulty of generated tasks.", show_default="1")
    ] = None,
) -> None:
    """Write tasks as folders that Harbor can play."""
    from envkit.wiring import terminal

    if family is None and (seeds is not None or difficulty is not None):
        raise typer.BadParameter("--seeds and --difficulty need a family of generated tasks", param_hint="--family")
    if family is not None and name:
        raise typer.BadParameter(f"{name[0]!r} is refused, since --family writes generated tasks", param_hint="NAME")
    if family is None:
        made = terminal.export(terminal.tasks_of(name or ()), folder)
    else:
        made = list(terminal.export_family(family, _range(seeds or "0:10"), difficulty or 1, folder))
    typer.echo(f"{len(made)} tasks in {folder}")


def _range(text: str) -> range:
    first, colon, end = text.partition(":")
    if not colon or not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
        raise typer.BadParameter(f"must be A:B with A < B, such as 0:100; got {text!r}", param_hint="--seeds")
    return range(int(first), int(end))
