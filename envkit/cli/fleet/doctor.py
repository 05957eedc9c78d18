"""``envkit doctor``: report which sandboxes and limits work on this machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from envkit.checks.doctor import DoctorReport


def doctor(
    image: Annotated[
        str | None, typer.Option(metavar="NAME", help="Image for the Docker check; by default the games image.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report which sandboxes and limits work on this machine.

    Starts sandboxes of each kind and runs a program in them. If something is missing, prints the command that fixes
    it. Exits with 1 only if no kind of sandbox works.
    """
    from envkit import clock
    from envkit.checks.doctor import examine

    found = clock.run(examine, image, _show_progress)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _print(found)
    sys.exit(0 if found.works else 1)


def _show_progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"trying {what} ...", end="\x1b[K\r", file=sys.stderr, flush=True)


def _print(found: DoctorReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from envkit.checks.doctor import CAPABILITIES
    from envkit.runs.printable import printable

    if sys.stderr.isatty():
        print(end="\x1b[K", file=sys.stderr, flush=True)
    table = Table("sandboxes", *(backend.name for backend in found.backends), box=None, pad_edge=False)
    works = [backend.problem is None for backend in found.backends]
    table.add_row("works", *(_mark(one) for one in works))
    for name in CAPABILITIES:
        marks = [_mark(backend.capabilities.get(name)) for backend in found.backends]
        table.add_row(f"  {name}", *marks)
    for label, times in (
        ("start", [backend.start_ms for backend in found.backends]),
        ("exec", [backend.exec_ms for backend in found.backends]),
    ):
        table.add_row(label, *("" if time is None else f"{time:g} ms" for time in times))
    console = Console(highlight=False)
    console.print(table)
    for backend in found.backends:
        if backend.problem is not None:
            console.print(printable(f"\n{backend.name}: {backend.problem}"), markup=False, soft_wrap=True)
        if backend.shared:
            console.print(
                f"\n{backend.name}: sandboxes of this kind compete for: {', '.join(backend.shared)}",
                markup=False,
                soft_wrap=True,
            )
        if backend.unenforced:
            line = f"\n{backend.name}: not enforced (docs/sandboxes.md): {', '.join(backend.unenforced)}"
            console.print(line, markup=False, soft_wrap=True)
        for remedy in backend.remedies:
            console.print(printable(f"  {backend.name}: {remedy}"), markup=False, soft_wrap=True)
    rest = Table(box=None, show_header=False, pad_edge=False)
    for name, value in found.machine.items():
        rest.add_row(name, value)
    console.print()
    console.print(rest)


def _mark(holds: bool | None) -> str:
    return "" if holds is None else "yes" if holds else "[red]no[/]"
