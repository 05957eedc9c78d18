"""``envkit doctor``: report which sandboxes and limits work on this machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.tables import echo, print_table

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
    from envkit.checks.doctor import CAPABILITIES

    if sys.stderr.isatty():
        print(end="\x1b[K", file=sys.stderr, flush=True)
    backends = found.backends
    rows = [["works", *(_mark(one.problem is None) for one in backends)]]
    rows += [[f"  {name}", *(_mark(one.capabilities.get(name)) for one in backends)] for name in CAPABILITIES]
    for label, times in (("start", [one.start_ms for one in backends]), ("exec", [one.exec_ms for one in backends])):
        rows.append([label, *("" if time is None else f"{time:g} ms" for time in times)])
    print_table(("sandboxes", *(one.name for one in backends)), rows)
    for one in backends:
        if one.problem is not None:
            echo(f"\n{one.name}: {one.problem}")
        if one.shared:
            echo(f"\n{one.name}: sandboxes of this kind compete for: {', '.join(one.shared)}")
        if one.unenforced:
            echo(f"\n{one.name}: not enforced (docs/sandboxes.md): {', '.join(one.unenforced)}")
        for remedy in one.remedies:
            echo(f"  {one.name}: {remedy}")
    echo()
    width = max(map(len, found.machine))
    for name, value in found.machine.items():
        echo(f"{name:<{width}}  {value}")


def _mark(holds: bool | None) -> str:
    return "" if holds is None else "yes" if holds else "no"
