"""``envkit sandbox``: run and manage sandboxes from the command line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, TypeAlias, TypeVar

import msgspec
import typer

from envkit.cli.tables import AsJson, duration, echo, moment, note, print_json, print_table
from envkit.errors import UsageError
from envkit.types import JSON, SandboxState, SandboxView

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from envkit.http.client.sandbox_client import SandboxClient
    from envkit.protocols import Sandbox
    from envkit.wiring.sandboxes.service import SandboxService

T = TypeVar("T")

_PROGRAM_CHARACTERS = 40
_PROGRAM_LAST = {"allow_interspersed_args": False}

app = typer.Typer(no_args_is_help=True, help="Run programs in sandboxes.", rich_markup_mode=None)

Backend: TypeAlias = Literal["auto", "local", "docker", "process"]
Program = Annotated[list[str] | None, typer.Argument(metavar="-- PROGRAM...", help="Program and its arguments.")]
TimeoutS = Annotated[
    float | None, typer.Option(min=0.001, metavar="SECONDS", help="Stop the program after this time (exit code 124).")
]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Give the program a terminal.")]

Url = Annotated[
    str | None, typer.Option(metavar="URL", help="Use the sandboxes of the server at this address, not this machine's.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File that contains the server's token; by default $ENVKIT_TOKEN."),
]
Ca = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="PEM file with the CA certificates to trust instead of the system's."),
]
SandboxId = Annotated[str, typer.Argument(metavar="ID", help="Id printed by run --detach; see envkit sandbox ls.")]

ServerUrl = Annotated[str, typer.Option(metavar="URL", help="Address of the server.")]

snapshot_app = typer.Typer(no_args_is_help=True, help="List and remove snapshots of a server.", rich_markup_mode=None)
app.add_typer(snapshot_app, name="snapshot")


@app.command("run", context_settings=_PROGRAM_LAST)
def run(
    program: Program = None,
    backend: Annotated[Backend, typer.Option(help="Kind of sandbox. The kind `process` does not isolate.")] = "auto",
    image: Annotated[str | None, typer.Option(metavar="NAME", help="Docker image with the sandbox's files.")] = None,
    cpus: Annotated[float | None, typer.Option(min=0.01, metavar="COUNT", help="Limit on processor cores.")] = None,
    memory_mib: Annotated[int | None, typer.Option(min=1, metavar="MIB", help="Limit on memory.")] = None,
    pids: Annotated[int | None, typer.Option(min=1, metavar="COUNT", help="Limit on processes and threads.")] = None,
    disk_mib: Annotated[
        int | None, typer.Option(min=1, metavar="MIB", help="Limit on disk space, per writable folder.")
    ] = None,
    network: Annotated[
        str, typer.Option(metavar="none|open|HOST,...", help="Network access; hosts are reached through a proxy.")
    ] = "none",
    profile: Annotated[
        Literal["strict", "system"], typer.Option(help="system: programs are root and can write to every folder.")
    ] = "strict",
    runtime: Annotated[str | None, typer.Option(metavar="NAME", help="Docker runtime, such as runsc.")] = None,
    untrusted: Annotated[
        bool, typer.Option("--untrusted", help="Fail unless all limits that contain hostile programs are enforced.")
    ] = False,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set an environment variable; repeatable.")
    ] = None,
    upload: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH[:NAME]", help="Copy this file or folder into the sandbox at its start; repeatable."),
    ] = None,
    timeout_s: TimeoutS = None,
    tty: Tty = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave the sandbox running and print its id.")] = False,
    ttl_s: Annotated[
        float | None,
        typer.Option(min=1, metavar="SECONDS", help="Stop the sandbox after this time; with --detach by default 3600."),
    ] = None,
    url: Url = None,
    token_file: TokenFile = None,
    ca: Ca = None,
) -> None:
    """Run a program or a shell in a new sandbox.

    Without PROGRAM, starts a shell. The sandbox ends with the program. Input, output and exit code are those of the
    program; 124 means a timeout, 125 a lost sandbox. With --url, the sandbox runs on a server.
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
        "detached": detach,
    }
    uploads = [_upload(one) for one in upload or ()]
    if detach and (tty or timeout_s is not None):
        raise UsageError("--detach does not wait for the program; leave out --tty and --timeout-s")
    service = _service(url, token_file, ca, backend)
    if detach:
        _run(service.detach, options, program or [], uploads, partial(print, flush=True))
        return
    _run_attached(service, service.running(options), program or [], timeout_s, tty, uploads)


@app.command("exec", context_settings=_PROGRAM_LAST)
def exec_(
    sandbox_id: SandboxId,
    program: Program = None,
    timeout_s: TimeoutS = None,
    tty: Tty = False,
    url: Url = None,
    token_file: TokenFile = None,
    ca: Ca = None,
) -> None:
    """Run a program or a shell in a detached sandbox."""
    program = program or []
    if program[:1] == ["--"]:  # the parser does not remove "--" if it follows the id
        program = program[1:]
    elif program and program[0].startswith("-"):
        raise UsageError(
            f"{program[0]}: put options before the id: envkit sandbox exec [OPTIONS] {sandbox_id} -- PROGRAM"
        )
    service = _service(url, token_file, ca)
    _run_attached(service, service.attached(sandbox_id), program, timeout_s, tty)


@app.command("logs")
def logs(
    sandbox_id: SandboxId,
    url: Url = None,
    token_file: TokenFile = None,
    ca: Ca = None,
) -> None:
    """Print the last lines of a detached sandbox's log. The log is the standard error of the sandbox's program."""

    async def log() -> str:
        async with _service(url, token_file, ca).attached(sandbox_id) as sandbox:
            return await sandbox.log()

    echo(_run(log), end="")


@app.command("rm")
def remove(
    sandbox_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids; see envkit sandbox ls.")],
    url: Url = None,
    token_file: TokenFile = None,
    ca: Ca = None,
) -> None:
    """Stop detached sandboxes and delete their files."""
    _run(_service(url, token_file, ca).remove, sandbox_ids)


@app.command("ls")
def list_sandboxes(
    with_servers: Annotated[
        bool, typer.Option("--all", help="Also list sandboxes of servers on this machine.")
    ] = False,
    as_json: AsJson = False,
    url: Url = None,
    token_file: TokenFile = None,
    ca: Ca = None,
) -> None:
    """List detached sandboxes, or all sandboxes of a server (--url).

    With --all, sandboxes of servers on this machine are listed too. A server stops its sandboxes when it ends. If it is
    killed, the sandboxes stop by themselves. With --json, times are in seconds.
    """
    if url is not None:
        if with_servers:
            raise UsageError("--all: --url already lists all sandboxes of the server; leave out --all")
        _print_views(ask_server(lambda client: client.views(), url, token_file, ca), as_json)
        return
    _service(url, token_file, ca)  # refuses options that need a server
    from envkit.wiring.sandboxes.service import list_detached_sandboxes

    found = _run(partial(list_detached_sandboxes, with_servers=with_servers, warn=note))
    if as_json:
        print_json({"id": one.id, **one.stats, "problem": one.problem, "of_server": one.of_server} for one in found)
        return
    notes = (", ".join(filter(None, (one.problem, "of a server" if one.of_server else ""))) for one in found)
    rows = [(one.id, *_figures(one.stats), note) for one, note in zip(found, notes, strict=True)]
    print_table(("ID", "AGE", "PROCESSES", "MEMORY", "NOTE"), rows)


@app.command("prune")
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
) -> None:
    """Remove what envkit processes that have ended left behind, and list it. Keeps detached sandboxes."""
    from envkit.wiring.sandboxes.service import prune as prune_all

    for line in _run(partial(prune_all, dry_run=dry_run, warn=note)):
        echo(line)


@snapshot_app.command("ls")
def list_snapshots(url: ServerUrl, as_json: AsJson = False, token_file: TokenFile = None, ca: Ca = None) -> None:
    """List the snapshots of a server. Times are in UTC; with --json they are seconds since 1970."""
    found = ask_server(lambda client: client.snapshots(), url, token_file, ca)
    if as_json:
        print_json(
            {
                "name": one.snapshot,
                "bytes": one.bytes,
                "taken_s": one.at_s,
                "sandbox": one.sandbox_id,
                "tenant": one.tenant,
            }
            for one in found
        )
        return
    print_table(
        ("NAME", "SIZE", "TAKEN", "SANDBOX", "TENANT"),
        [
            (one.snapshot, f"{one.bytes / (1 << 20):.1f} MiB", moment(one.at_s), one.sandbox_id, one.tenant)
            for one in found
        ],
    )


@snapshot_app.command("rm")
def remove_snapshots(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names; see envkit sandbox snapshot ls.")],
    url: ServerUrl,
    token_file: TokenFile = None,
    ca: Ca = None,
) -> None:
    """Remove snapshots of a server. A snapshot that does not exist is not an error."""

    async def remove_all(client: SandboxClient) -> None:
        for name in names:
            await client.remove_snapshot(name)

    ask_server(remove_all, url, token_file, ca)


def _run_attached(
    service: SandboxService,
    opened: AbstractAsyncContextManager[Sandbox],
    program: Sequence[str],
    timeout_s: float | None,
    tty: bool,
    uploads: Sequence[tuple[Path, str]] = (),
) -> NoReturn:
    """Run a program (by default a shell) in a sandbox, and exit with its code."""
    from envkit.cli.fleet.attached import run_attached

    timeout_s = timeout_s or service.longest_s
    sys.exit(_run(partial(run_attached, opened, program, uploads, timeout_s=timeout_s, tty=tty)))


def _run(call: Callable[..., Awaitable[T]], *args: object) -> T:
    from envkit import clock  # slow to import

    return clock.run(call, *args)


def ask_server(call: Callable[[SandboxClient], Awaitable[T]], url: str, token_file: Path | None, ca: Path | None) -> T:
    """Connect to a server, and return the result of `call` with its client."""

    async def main() -> T:
        async with _service(url, token_file, ca).client() as client:
            return await call(client)

    return _run(main)


def _service(url: str | None, token_file: Path | None, ca: Path | None, backend: Backend = "auto") -> SandboxService:
    """Return the sandboxes of the server at `url`, or those of this machine if `url` is None."""
    if url is None and (token_file is not None or ca is not None):
        raise UsageError("--token-file and --ca need --url")
    if url is not None and backend != "auto":
        raise UsageError("--backend: a server chooses its own backend; leave out --backend or --url")
    from envkit.wiring.sandboxes.service import SandboxService

    return SandboxService(backend, url, token_file, ca)


def _print_views(views: Sequence[SandboxView], as_json: bool) -> None:
    """Print the sandboxes of a server."""
    if as_json:
        print_json(
            {
                "id": view.id,
                "state": view.state.value,
                "started_s": view.phases[0].at_s,
                "since_s": view.phases[-1].at_s,
                "node": view.node,
                "command": [*view.spec.command],
                "reason": view.phases[-1].reason,
                "cause": msgspec.to_builtins(view.phases[-1].cause),
            }
            for view in views
        )
        return
    from envkit import clock

    now_s, rows = clock.wall(), []
    for view in views:
        state, last = view.state.value, view.phases[-1]
        if view.state in (SandboxState.STOPPED, SandboxState.LOST):
            ended = "ended" if view.state is SandboxState.STOPPED else "lost"
            state = f"{ended} {duration(max(0.0, now_s - last.at_s))} ago"
        program = shlex.join(view.spec.command)
        shown = program if len(program) <= _PROGRAM_CHARACTERS else f"{program[:_PROGRAM_CHARACTERS]}..."
        rows.append((view.id, state, duration(max(0.0, now_s - view.phases[0].at_s)), view.node, shown, last.reason))
    print_table(("ID", "STATE", "AGE", "NODE", "COMMAND", "REASON"), rows)


def _figures(stats: Mapping[str, JSON]) -> tuple[str, str, str]:
    """Return the age, the number of processes and the memory as text; each is empty if unknown."""
    seconds, processes, memory = (stats.get(name) for name in ("uptime_s", "processes", "memory_bytes"))
    return (
        duration(seconds) if isinstance(seconds, (int, float)) else "",
        "" if processes is None else str(processes),
        f"{memory >> 20} MiB" if isinstance(memory, int) else "",
    )


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(f"--env: must be NAME=VALUE, got {text!r}")
    return name, value


def _upload(text: str) -> tuple[Path, str]:
    path, _, name = text.partition(":")
    source = Path(path)
    if not source.exists():
        raise UsageError(f"--upload: no such file or folder: {path}")
    return source, name or source.resolve().name
