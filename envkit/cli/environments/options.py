"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from envkit.errors import UsageError

if TYPE_CHECKING:
    from envkit.types import JSON


def complete_env(incomplete: str) -> list[str]:
    """Return the ids of environments that begin with `incomplete`, for the completion of the shell."""
    from envkit.wiring.environments import registered

    return [spec.id for spec in registered() if spec.id.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Return the folders of runs and evaluations that begin with `incomplete`, also those one folder below."""
    from envkit.runs.episodes import EPISODES

    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    files = (folder.glob(f"{below}/{name}") for below in ("*", "*/*") for name in ("config.yaml", EPISODES))
    found = {f"{file.parent}/" for some in files for file in some}
    return sorted(one for one in found if one.startswith(incomplete))


EnvOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Set an option of the environment, such as size=6; repeatable."),
]

EnvId: TypeAlias = Annotated[
    str, typer.Argument(metavar="ENV", autocompletion=complete_env, help="A registered environment; see envkit list.")
]
Backend: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="auto|local|docker|process", help="Sandboxes of an environment that uses them as tools."),
]
Judge: TypeAlias = Annotated[
    str | None, typer.Option(metavar="MODEL@URL", help="Judge of an environment that needs one.")
]
Recording: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        autocompletion=complete_run,
        help="Folder of a training run or of envkit eval --output, or a .jsonl file in it.",
    ),
]
TrainStep: TypeAlias = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Train step; by default the last recorded one.")
]


def read_options(words: Sequence[str]) -> dict[str, JSON]:
    """Return the options in ``key=value`` words. Each value is read as YAML, as in files.

    Raises:
        UsageError: A word is not ``key=value``, or its value is not YAML.
    """
    import yaml

    from envkit.config.grammar import read_yaml

    options: dict[str, JSON] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise UsageError(f"--option {word}: must have the form key=value, such as size=6")
        try:
            options[key] = read_yaml(value)
        except yaml.YAMLError:
            raise UsageError(f"--option {word}: {value!r} is not YAML") from None
    return options
