"""``envkit vllm``: a vLLM server that training runs can use one after another."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from envkit.cli.tables import echo, note


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
