"""``envkit swe``: make tasks of SWE-v0, verify them, and grade patches."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from envkit.cli.exits import FAILED
from envkit.cli.tables import print_table
from envkit.cli.tasks.progress import progress_bar

app = typer.Typer(no_args_is_help=True, help="Make, verify and grade tasks of SWE-v0.", rich_markup_mode=None)

_Backend = Annotated[str, typer.Option(metavar="auto|local|docker", help="Sandboxes in which tests run.")]
_Jobs = Annotated[int, typer.Option(min=1, metavar="COUNT", help="Number of test runs at once.")]


@app.command("packages")
def list_packages() -> None:
    """List the packages that `envkit swe build named` uses: their tests pass, and pip fetches them on demand."""
    from envkit.wiring.swe import named

    rows = [(package, "(part of envkit)" if needs is None else " ".join(needs)) for package, needs in named()]
    print_table(("PACKAGE", "TESTS NEED"), rows)


@app.command()
def build(
    package: Annotated[
        list[str],
        typer.Argument(
            metavar="PACKAGE==VERSION...",
            help="Packages; `named`: all of envkit swe packages; `own`: the one of envkit.",
        ),
    ],
    out: Annotated[Path, typer.Option(file_okay=False, metavar="DIR", help="Folder to make or continue.")],
    want: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Number of tasks of each package.")] = 10,
    combine: Annotated[
        int,
        typer.Option(min=1, max=5, metavar="COUNT", help="Largest number of bugs of a task."),
    ] = 1,
    seed: Annotated[int, typer.Option(metavar="SEED", help="Chooses the bugs.")] = 0,
    more: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="PACKAGE==VERSION", help="Package that the tests import; repeatable."),
    ] = None,
    jobs: _Jobs = 2,
    backend: _Backend = "auto",
) -> None:
    """Make tasks: put bugs into packages, and keep those that the packages' own tests find.

    The folder gets the tasks and a lock file. If the command is interrupted, run it again: it continues.
    """
    from envkit.wiring import swe

    chosen = swe.packages_of(package)
    words = ["envkit", "swe", "build", *package, f"--want={want}", f"--combine={combine}", f"--seed={seed}"]
    done: dict[str, int] = {}
    with progress_bar("making tasks", want * len(chosen)) as (announce, move):

        def on_task(name: str, count: int) -> None:
            done[name] = count
            move(sum(done.values()))

        yields = swe.build(
            chosen,
            out,
            want=want,
            combine=combine,
            seed=seed,
            jobs=jobs,
            more=more or (),
            command=shlex.join([*words, *(f"--with={one}" for one in more or ())]),
            backend=backend,
            announce=announce,
            on_task=on_task,
        )
    print_table(
        ("PACKAGE", "TASKS", "S/TASK", "TRIED"),
        [
            (
                one.package,
                str(one.tasks),
                f"{one.seconds / max(1, one.tasks):.1f}",
                ", ".join(f"{count} {verdict}" for verdict, count in sorted(one.tried.items())),
            )
            for one in yields
        ],
    )
    typer.echo(f"{sum(one.tasks for one in yields)} tasks in {out}")


@app.command()
def grade(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Id of a task.")],
    patch: Annotated[
        str, typer.Argument(metavar="PATCH", help="File with a diff of the package; - for standard input.")
    ],
    tasks: Annotated[
        Path | None,
        typer.Option(exists=True, metavar="PATH", help="Folder or file of the task; by default the tasks of envkit."),
    ] = None,
    backend: _Backend = "auto",
) -> None:
    """Grade a patch: print the result of each test that counts, and the verdict. Exit with 1 if it is not resolved."""
    from envkit.errors import UsageError
    from envkit.wiring import swe

    try:
        content = sys.stdin.read() if patch == "-" else Path(patch).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the patch {patch}: {error}") from None
    located = swe.find_task(tasks, task)
    verdict = swe.grade(located, content, backend=backend, announce=_log)
    print_table(("KIND", "OUTCOME", "TEST"), [(one.kind, one.outcome, test) for test, one in verdict.tests.items()])
    for path, why in verdict.refused.items():
        typer.echo(f"not taken over: {path}: {why}")
    for flag in verdict.flags:
        typer.echo(f"to review: {flag}")
    if verdict.problem:
        typer.echo(f"the run is not valid: {verdict.problem}")
    passed = sum(one.is_ok for one in verdict.tests.values())
    typer.echo(f"{'resolved' if verdict.resolved else 'not resolved'}: {passed} of {len(verdict.tests)} tests pass")
    if not verdict.resolved:
        raise typer.Exit(FAILED)


@app.command()
def verify(
    path: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Folders of tasks, or files of JSON lines, plain or gzip, with `base`."),
    ],
    jobs: _Jobs = 2,
    backend: _Backend = "auto",
) -> None:
    """Verify tasks: a task's own fix must be resolved, and the source with the bug must not. Otherwise exit with 1."""
    from envkit.wiring import swe

    located = [one for file in path for one in swe.read_tasks(file)]
    with progress_bar("verifying", len(located)) as (announce, move):
        done: list[str] = []

        def on_check(check: swe.Check) -> None:
            done.append(check.task_id)
            move(len(done))
            if check.problem:
                announce(f"{check.task_id}: {check.problem}")
            elif check.note:
                announce(f"{check.task_id}: valid, but flaky: {check.note}")

        checks = swe.verify(located, jobs=jobs, backend=backend, announce=announce, on_check=on_check)
    oracle, nop = sum(one.oracle for one in checks), sum(one.nop for one in checks)
    typer.echo(f"oracle {oracle}/{len(checks)}, nop {nop}/{len(checks)}")
    if any(one.problem for one in checks):
        raise typer.Exit(FAILED)


@app.command("import")
def import_tasks(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="Rows of SWE-bench, SWE-Gym, SWE-smith, R2E-Gym or envkit: JSON lines, plain or gzip, a JSON list, or "
            "parquet.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    strict: Annotated[bool, typer.Option("--strict", help="List rows that cannot be used, and write nothing.")] = False,
) -> None:
    """Write the tasks of another data set as a folder of tasks. Rows that cannot be used are left out."""
    from envkit.wiring import swe

    command = shlex.join(["envkit", "swe", "import", str(file), f"--out={out}"])
    tasks = swe.import_tasks(file, out, command=command, strict=strict)
    typer.echo(f"{len(tasks)} tasks in {out}")
    if count := sum(not task.base for task in tasks):
        need = "needs" if count == 1 else "need"
        typer.echo(f"{count} of them {need} an image of the data set: SWE-v0 plays only tasks of source distributions")


def _log(line: str) -> None:
    typer.echo(line, err=True)
