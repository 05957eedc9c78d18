"""``envkit tasks ENV COMMAND``: commands of an environment's tasks, from its spec and for every environment."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
import typer.core

from envkit.cli.environments.options import Backend, EnvOptions, Judge, read_options
from envkit.cli.exits import FAILED
from envkit.cli.tables import echo, print_table

if TYPE_CHECKING:
    from envkit.registry import EnvSpec
    from envkit.types import CommandResult

_GENERIC = {
    "ls": "envkit.wiring.commands:ls",
    "show": "envkit.wiring.commands:show",
    "check": "envkit.checks.tasks:check",
}
_SHARED = {"options": ("option", EnvOptions), "backend": ("backend", Backend), "judge": ("judge", Judge)}
"""Name and annotation on the command line of arguments that several commands have."""


class _Environments(typer.core.TyperGroup):
    """The registered environments as commands; the help lists those with own commands, a task set or an oracle."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [spec.id for spec in self._listed()]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Environments with tasks (the others have ls, show and check)"):
            formatter.write_dl([(spec.id, spec.summary) for spec in self._listed()])

    def get_command(self, ctx: Any, cmd_name: str) -> typer.core.TyperGroup:
        from envkit.wiring.environments import find

        return _commands_of(find(cmd_name))

    @staticmethod
    def _listed() -> list[EnvSpec]:
        from envkit.wiring.environments import registered

        return [spec for spec in registered() if spec.commands or spec.task_set or "oracle" in spec.players]


class _Commands(typer.core.TyperGroup):
    """The commands of an environment, whose options may also come before the name of the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = next((place for place, word in enumerate(args) if word in self.commands), 0)
        return super().parse_args(ctx, [*args[at : at + 1], *args[:at], *args[at + 1 :]])


def _commands_of(spec: EnvSpec) -> typer.core.TyperGroup:
    """Return the commands of one environment; its own ones replace those that every environment has."""
    from envkit.registry import load
    from envkit.runs.display import StreamDisplay
    from envkit.wiring.commands import run

    app = typer.Typer(cls=_Commands, no_args_is_help=True, help=spec.summary, rich_markup_mode=None)

    def call(name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> CommandResult:
        if "option" in arguments:
            arguments["options"] = read_options(arguments.pop("option") or ())
        with closing(StreamDisplay(sys.stderr)) as display:
            return run(spec, name, function, arguments, display=display)

    for name, entry_point in {**_GENERIC, **spec.commands}.items():
        function = load(entry_point)
        app.command(name)(_exposed(function, partial(call, name, function)))
    return typer.main.get_group(app)


def _exposed(function: Callable[..., Any], call: Callable[[dict[str, Any]], CommandResult]) -> Callable[..., None]:
    """Return a function with those parameters of `function` that users give; it prints what `call` returns."""
    from envkit.wiring.commands import RESERVED

    shown: list[inspect.Parameter] = []
    for one in inspect.signature(function, eval_str=True).parameters.values():
        if (shared := _SHARED.get("backend" if one.name == "sandboxes" else one.name)) is not None:
            shown.append(one.replace(name=shared[0], annotation=shared[1], default=None))
        elif one.name not in RESERVED:
            shown.append(one)

    def command(**arguments: Any) -> None:
        result = call(arguments)
        for part in result.parts:
            if isinstance(part, str):
                echo(part)
            elif len(part) > 1:
                print_table(part[0], part[1:])
        if not result.is_ok:
            raise typer.Exit(FAILED)

    command.__doc__ = function.__doc__
    command.__annotations__ = {one.name: one.annotation for one in shown}
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined] # typer reads it
    return command


app = typer.Typer(
    cls=_Environments,
    no_args_is_help=True,
    rich_markup_mode=None,
    subcommand_metavar="ENV COMMAND [ARGS]...",
    help="List, show and check the tasks of an environment, and make some. `envkit tasks ENV --help` lists its "
    "commands.",
)


@app.callback()
def _options() -> None:
    pass
