"""``envkit model``: list and download the language models of the catalogue."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from envkit.cli.tables import AsJson, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="List and download language models.", rich_markup_mode=None)


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name, such as smollm2-135m; see envkit model list.")],
) -> None:
    """Download a model with pip, convert it for transformers, and print its folder. Needed only once per model."""
    from envkit.wiring.api import display_on
    from envkit.wiring.training.models import fetch, find

    model = find(name)
    with closing(display_on(sys.stderr)) as display:
        if not fetch(model, display):
            display.announce(f"{name} is already on this machine")
    typer.echo(model.folder)


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models that envkit can download."""
    from envkit.wiring.training.models import CATALOGUE

    models = CATALOGUE.values()
    if as_json:
        print_json(
            {
                "name": model.name,
                "parameters": model.parameters,
                "download_bytes": model.wheel_bytes,
                "licence": model.licence,
                "fetched": model.is_fetched,
                "path": str(model.folder),
            }
            for model in models
        )
        return
    rows = [
        (
            model.name,
            f"{model.parameters:,}",
            f"{model.wheel_bytes // 1_000_000} MB",
            model.licence,
            "yes" if model.is_fetched else "no",
            str(model.folder),
        )
        for model in models
    ]
    print_table(("NAME", "PARAMETERS", "DOWNLOAD", "LICENCE", "FETCHED", "FOLDER"), rows)
