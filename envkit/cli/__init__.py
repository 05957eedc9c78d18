"""The command line. Each command parses its arguments, imports slow modules, makes one call and prints."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from envkit import __version__
from envkit.cli.environments.check_env import check_env
from envkit.cli.environments.data import data
from envkit.cli.environments.listing import list_envs
from envkit.cli.environments.play import play
from envkit.cli.environments.show import show
from envkit.cli.exits import as_exit_code
from envkit.cli.fleet import image, node, sandbox, token
from envkit.cli.fleet.doctor import doctor
from envkit.cli.fleet.serve import serve
from envkit.cli.tables import echo
from envkit.cli.tasks import app as tasks
from envkit.cli.training import model
from envkit.cli.training.check import check
from envkit.cli.training.check_template import check_template
from envkit.cli.training.evaluate import evaluate
from envkit.cli.training.rescore import rescore
from envkit.cli.training.train import train
from envkit.cli.training.vllm import vllm

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Print help as plain text, which both people and programs can read.
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train)
app.command("check")(check)
app.command("check-env")(check_env)
app.command("check-template")(check_template)
app.command("eval")(evaluate)
app.command("show")(show)
app.command("rescore")(rescore)
app.command("play")(play)
app.command("serve")(serve)
app.command("vllm")(vllm)
app.command("list")(list_envs)
app.command("data")(data)
app.command("doctor")(doctor)
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(image.app, name="image")
app.add_typer(model.app, name="model")
app.add_typer(token.app, name="token")
app.add_typer(node.app, name="node")
app.add_typer(tasks.app, name="tasks")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 0 (success), 1 (failure), 2 (invalid request), 130 (interrupted) or the command's code.

    Args:
        arguments: The arguments of the command line; None uses `sys.argv`.
    """
    _fill_standard_files()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # it may have another encoding than UTF-8
            stream.reconfigure(errors="backslashreplace")
    words = _at_home(sys.argv[1:] if arguments is None else arguments)
    if (new := _renamed(words)) is not None:
        echo(f"`envkit {' '.join(words[:2])}` is now: envkit {shlex.join(new)}", err=True)
    with as_exit_code():
        typer.main.get_command(app).main(args=words if new is None else new, prog_name="envkit")


def _at_home(words: Sequence[str]) -> list[str]:
    """Return the words of a command with ``~`` as the home folder, which no shell replaces in ``--output=~/runs``.

    Words that a sandbox gets are not changed, because its home folder is another.
    """
    own = words.index("--") if "--" in words else len(words)
    optional = "" if words[:1] == ["sandbox"] else "?"
    pattern = re.compile(rf"(--[\w-]+=){optional}(~(?:/.*)?)", re.DOTALL)

    def at_home(word: str) -> str:
        found = pattern.fullmatch(word)
        return word if found is None else f"{found[1] or ''}{Path(found[2]).expanduser()}"

    return [*map(at_home, words[:own]), *words[own:]]


def _renamed(words: Sequence[str]) -> list[str] | None:
    """Return the new spelling of a command that was renamed; None for the other commands."""
    match words:
        case ["check-task", *rest]:
            env_id = next((word for word in rest if re.search(r"-v\d+$", word)), "")
            others = [word for word in rest if word != env_id]
            return ["tasks", env_id, "check", *others] if env_id else ["tasks", *others]
        case ["swe", "verify", path, *rest]:
            only = ["--player=oracle", "--player=nop", "--repeat=1", "--retry"]
            return ["tasks", "SWE-v0", "check", f"--option=tasks={path}", "--split=any", "--count=0", *only, *rest]
        case ["terminal", "check", *rest]:
            return ["tasks", "Terminal-v0", "ls", *rest]
        case [("swe" | "terminal") as name, *rest]:
            return ["tasks", {"swe": "SWE-v0", "terminal": "Terminal-v0"}[name], *rest]
    return None


def _fill_standard_files() -> None:
    """Open /dev/null for each closed standard stream (as after ``<&-``), so that no other file gets its descriptor."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        echo(f"envkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve environments, train and evaluate policies, and run sandboxes."""
