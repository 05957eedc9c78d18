"""``envkit doctor``: report which sandboxes and limits work on this machine, or whether a cluster works."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.tables import echo, print_json, print_table

if TYPE_CHECKING:
    from envkit.checks.doctor import BackendFound


def doctor(
    image: Annotated[
        str | None, typer.Option(metavar="NAME", help="Image for the Docker check; by default the games image.")
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Check the other machines that a server file or a training file names, instead of this one.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report which sandboxes and limits work on this machine.

    Starts sandboxes of each kind and runs a program in them. If something is missing, prints the command that fixes
    it. Exits with 1 only if no kind of sandbox works; with --cluster, if anything is wrong.
    """
    from envkit import clock

    if cluster is not None:
        sys.exit(_print_cluster(cluster, as_json=as_json))
    from envkit.checks.doctor import examine

    backends, machine = clock.run(examine, image)
    works = any(one.problem is None for one in backends)
    if as_json:
        report = {"works": works, "backends": [asdict(one) for one in backends], "machine": machine}
        print(json.dumps(report, indent=2))
    else:
        _print(backends, machine)
    sys.exit(0 if works else 1)


def _print_cluster(file: Path, *, as_json: bool) -> int:
    """Check the machines that a file names, print what was found, and return the exit code."""
    from envkit import clock
    from envkit.checks.cluster import examine_cluster

    found = clock.run(examine_cluster, file)
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        rows = [
            ["wrong" if one.remedy else "ok", one.machine, one.check, "; ".join(filter(None, (one.result, one.remedy)))]
            for one in found
        ]
        print_table(("", "MACHINE", "CHECK", "RESULT"), rows)
    return 1 if any(one.remedy for one in found) else 0


def _print(backends: Sequence[BackendFound], machine: Mapping[str, str]) -> None:
    from envkit.checks.doctor import CAPABILITIES

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
    width = max(map(len, machine))
    for name, value in machine.items():
        echo(f"{name:<{width}}  {value}")


def _mark(holds: bool | None) -> str:
    return "" if holds is None else "yes" if holds else "no"
