"""``envkit sandbox``: programs in boxes, from the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from envkit.errors import UsageError
from envkit.types import JSON

_PROGRAM_LAST = {"allow_interspersed_args": False}

app = typer.Typer(no_args_is_help=True, help="Run programs in sandboxes.", rich_markup_mode=None)

Program = Annotated[list[str] | None, typer.Argument(metavar="-- PROGRAM...", help="Program and arguments.")]
TimeoutS = Annotated[
    float | None, typer.Option(min=0.001, metavar="SECONDS", help="When the program is stopped (exit code 124).")
]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Give the program a terminal.")]


@app.command("run", context_settings=_PROGRAM_LAST)
def run(
    program: Program = None,
    backend: Annotated[
        Literal["auto", "local", "docker", "process"], typer.Option(help="Who starts the box.")
    ] = "auto",
    image: Annotated[str | None, typer.Option(metavar="NAME", help="Image whose files it sees.")] = None,
    cpus: Annotated[float | None, typer.Option(min=0.01, metavar="COUNT", help="Bound on processors.")] = None,
    memory_mib: Annotated[int | None, typer.Option(min=1, metavar="MIB", help="Bound on memory.")] = None,
    pids: Annotated[int | None, typer.Option(min=1, metavar="COUNT", help="Bound on processes.")] = None,
    disk_mib: Annotated[int | None, typer.Option(min=1, metavar="MIB", help="Bound on what is written.")] = None,
    network: Annotated[
        str, typer.Option(metavar="none|open|HOST,...", help="What it can reach; hosts by way of a proxy.")
    ] = "none",
    profile: Annotated[
        Literal["strict", "system"], typer.Option(help="system: root, and a root file system that can be written.")
    ] = "strict",
    runtime: Annotated[str | None, typer.Option(metavar="NAME", help="Docker's runtime, such as runsc.")] = None,
    untrusted: Annotated[
        bool, typer.Option("--untrusted", help="Refuse unless everything is enforced that keeps hostile programs in.")
    ] = False,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Variable in the box.")] = None,
    upload: Annotated[
        list[str] | None, typer.Option(metavar="PATH[:NAME]", help="File or folder to copy into the box first.")
    ] = None,
    timeout_s: TimeoutS = None,
    tty: Tty = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave the box running and print its id.")] = False,
    ttl_s: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="When the box ends; an hour if detached.")
    ] = None,
) -> None:
    """Run a program in a new box, and end the box with it; without a program, a shell.

    Its output, input and exit code are those of the program; 124 is a timeout, 125 a box that was lost.
    """
    options = {
        "image": image,
        "cpus": cpus,
        "memory_mib": memory_mib,
        "pids": pids,
        "disk_mib": disk_mib,
        "network": network if network in ("none", "open") else tuple(filter(None, network.split(","))),
        "profile": profile,
        "runtime": runtime,
        "untrusted": untrusted,
        "env": dict(_setting(one) for one in env or ()),
        "ttl_s": 3600.0 if detach and ttl_s is None else ttl_s,
        "stay": detach,
    }
    uploads = [_upload(one) for one in upload or ()]
    if detach and (tty or timeout_s is not None):
        raise UsageError("--detach goes with neither --tty nor --timeout-s: nobody waits for the program")
    from envkit import clock
    from envkit.wiring import box_commands

    if detach:
        clock.run(box_commands.detach, backend, options, program or [], uploads, partial(print, flush=True))
        return
    sys.exit(clock.run(box_commands.run, backend, options, program or [], uploads, timeout_s, tty))


@app.command("exec", context_settings=_PROGRAM_LAST)
def exec_(
    box_id: Annotated[str, typer.Argument(metavar="ID", help="What run --detach printed.")],
    program: Program = None,
    timeout_s: TimeoutS = None,
    tty: Tty = False,
) -> None:
    """Run a program in a box that was left running; without one, a shell."""
    program = program or []
    if program[:1] == ["--"]:  # behind the id it is a word like any other
        program = program[1:]
    from envkit import clock
    from envkit.wiring import box_commands

    sys.exit(clock.run(box_commands.exec_in, box_id, program, timeout_s, tty))


@app.command("logs")
def logs(box_id: Annotated[str, typer.Argument(metavar="ID", help="What run --detach printed.")]) -> None:
    """Print the end of what the program of a detached box wrote to standard error."""
    from envkit import clock
    from envkit.wiring import box_commands

    sys.stdout.write(clock.run(box_commands.log_of, box_id))


@app.command("rm")
def remove(box_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="What run --detach printed.")]) -> None:
    """End boxes that were left running, with everything in them."""
    from envkit import clock
    from envkit.wiring import box_commands

    clock.run(box_commands.remove, box_ids)


@app.command("ls")
def list_boxes() -> None:
    """List the boxes that were left running: id, seconds since its start, processes, MiB of memory."""
    from envkit import clock
    from envkit.wiring import box_commands

    for found in clock.run(box_commands.list_staying):
        print(found.id, found.problem or _figures(found.stats), sep="\t")


def _figures(stats: Mapping[str, JSON]) -> str:
    seconds, processes, memory = (stats.get(name) for name in ("uptime_s", "processes", "memory_bytes"))
    figures = [f"{seconds:.0f} s" if isinstance(seconds, (int, float)) else "", f"{processes} processes"]
    return "\t".join([*figures, *([f"{memory >> 20} MiB"] if isinstance(memory, int) else ())])


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(f"--env: must be NAME=VALUE, got {text!r}")
    return name, value


def _upload(text: str) -> tuple[Path, str]:
    path, _, name = text.partition(":")
    source = Path(path)
    if not source.exists():
        raise UsageError(f"--upload: there is no {path}")
    return source, name or source.resolve().name
