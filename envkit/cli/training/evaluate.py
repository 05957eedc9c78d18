"""``envkit eval``: measure how well a policy plays, and compare two results."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envkit.cli.environments.options import EnvOptions, complete_env, read_options
from envkit.cli.tables import echo
from envkit.errors import OptionError, UsageError
from envkit.runs.printable import counted
from envkit.shorthands import SHORTHANDS

if TYPE_CHECKING:
    from envkit.trainer_bridge.evaluation.report import EvaluationFolder

_TYPES = {"COUNT": int, "SEED": int, "X": float}


def _short(*names: str) -> dict[str, Any]:
    """Return the options that are short names of keys."""
    found = {name: SHORTHANDS[name] for name in names}
    return {
        name: Annotated[_TYPES.get(one.metavar, str) | None, typer.Option(metavar=one.metavar, help=one.help)]
        for name, one in found.items()
    }


_PARAMETERS: dict[str, Any] = {
    "target": Annotated[
        str | None,
        typer.Argument(
            metavar="ENV|FILE",
            autocompletion=complete_env,
            help="A registered environment (see envkit list), or an evaluation file.",
        ),
    ],
    **_short("policy", "episodes", "attempts"),
    "option": EnvOptions,
    **_short("split"),
    "greedy": Annotated[bool, typer.Option("--greedy", help="The same as --temperature 0.")],
    "output": Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Save episodes and results here; if interrupted, repeat the command to continue.",
        ),
    ],
    "overrides": Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of docs/eval-config.md; repeatable."),
    ],
    **_short("url"),
    "as_json": Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")],
    "compare": Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Compare two folders of --output: settings, paired difference, flips."),
    ],
    **_short("seed"),
    "tasks": Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of tasks, for environments that play such folders: all its tasks."),
    ],
    **_short("temperature", "turn_tokens", "max_turns", "system"),
    "param": Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Send this parameter to an endpoint, such as reasoning_effort=low; null leaves one out; repeatable.",
        ),
    ],
    **_short("backend", "judge"),
    "force": Annotated[bool, typer.Option("--force", help="Replace the evaluation that is already in the folder.")],
    "dialogues": Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write successful episodes here, for imitation.kind: dialogues."),
    ],
}
"""The argument and the options, the most used ones first."""
_SPELLED = {"target": "ENV|FILE", "overrides": "--set", "as_json": "--json"}
_UNSET: tuple[object, ...] = (None, False, [])
_DEFAULTS = {"greedy": False, "as_json": False, "force": False}


def evaluate(**chosen: Any) -> None:
    """Measure how well a policy plays. Prints the mean and the 95 % interval of each metric.

    Example: envkit eval FrozenLake-v0 --policy expert
    """
    if compared := chosen["compare"]:
        from envkit.trainer_bridge.evaluation.compare import compare

        others = [
            _SPELLED.get(name, f"--{name.replace('_', '-')}") for name, one in chosen.items() if one not in _UNSET
        ]
        others.remove("--compare")
        if others:
            raise UsageError(f"--compare takes two folders and nothing else; leave out {', '.join(others)}")
        for line in compare(*compared):
            echo(line)
        return
    if chosen["target"] is None:
        raise UsageError("name an environment or an evaluation file")
    if chosen["force"] and chosen["output"] is None:
        raise UsageError("--force replaces the evaluation in the folder --output; add --output, or leave out --force")
    settings = {name: chosen[name] for name in SHORTHANDS}
    options = read_options(chosen["option"] or ())
    if chosen["tasks"] is not None:
        if not chosen["tasks"].exists():
            raise UsageError(f"--tasks: there is no folder {chosen['tasks']}; the option for a number is --episodes")
        options["tasks"] = str(chosen["tasks"])
        settings["split"] = settings["split"] or "any"
    chosen["overrides"] = [
        *(chosen["overrides"] or ()),
        *(f"rollout.parameters.{one}" for one in chosen["param"] or ()),
    ]
    _run(chosen, {**settings, "options": options or None, "greedy": chosen["greedy"]})


def _run(chosen: dict[str, Any], settings: dict[str, Any]) -> None:
    from envkit.trainer_bridge.evaluation.table import lines
    from envkit.wiring import api

    folder, as_json, dialogues = None, chosen["as_json"], chosen["dialogues"]
    if chosen["output"] is not None:
        from envkit.trainer_bridge.evaluation.report import EvaluationFolder

        folder = EvaluationFolder(chosen["output"], force=chosen["force"])
    with _split_hint(settings["split"], settings["options"] or {}), _resume_hint(folder):
        found = api.evaluate(
            chosen["target"], overrides=chosen["overrides"], output=folder, dialogues=dialogues, **settings
        )
    if as_json:
        import orjson

        plain = orjson.loads(orjson.dumps(found.as_json()))  # orjson writes NaN as null
        print(json.dumps(plain, separators=(",", ":")))  # ASCII
    else:
        for line in lines(found):
            echo(line)
    if dialogues is not None:
        echo(f"written: {dialogues}", err=as_json)
    if folder is not None:
        echo(f"written: {', '.join(map(str, folder.files))}", err=as_json)
        if found.void:
            echo("to play the lost episodes again, repeat the command", err=as_json)


# Typer reads the argument and the options from the signature.
evaluate.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=one)
        for name, one in _PARAMETERS.items()
    ]
)
evaluate.__annotations__ = _PARAMETERS


@contextmanager
def _resume_hint(folder: EvaluationFolder | None) -> Iterator[None]:
    """If an error ends a ``with`` block, print the command that resumes the evaluation."""
    try:
        yield
    except BaseException:
        if folder is not None and folder.count:
            words = shlex.join(["envkit", *(word for word in sys.argv[1:] if word != "--force")])
            finished = counted(folder.count, "finished episode")
            echo(f"{finished} saved in {folder.path}; continue with: {words}", err=True)
        raise


@contextmanager
def _split_hint(split: str | None, options: dict[str, Any]) -> Iterator[None]:
    """If an environment rejects the split, add a remedy to the error: the user may only have used --split's default."""
    try:
        yield
    except OptionError as error:
        if error.option != "split" or "split" in options:
            raise
        raise UsageError(f"--split {split or 'eval'}: {error.reason}; use --split any") from None
