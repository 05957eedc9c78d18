"""``envkit vllm``: a vLLM server that training runs can use one after another."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Literal

import typer

from envkit.errors import UsageError


def vllm(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Catalogue name (envkit model list), GGUF file, model folder or hub name."
        ),
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="Port on 127.0.0.1.")] = 8100,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Python interpreter that has vllm; by default that of make vllm, or else the one that runs envkit.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Number format of the weights.")
    ] = "auto",
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="COUNT", help="Maximum tokens of a prompt and its completion together.")
    ] = 4096,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, metavar="COUNT", help="Maximum number of completions in progress.")
    ] = 64,
    lora_rank: Annotated[
        int,
        typer.Option(
            min=0, metavar="RANK", help="Maximum rank of LoRA adapters; 0: the runs send all weights, not adapters."
        ),
    ] = 0,
    gpus: Annotated[
        str, typer.Option(metavar="LIST", help="CUDA_VISIBLE_DEVICES; several, such as 0,1, use tensor parallelism.")
    ] = "",
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1.0, metavar="X", help="Share of a GPU's memory to use.")
    ] = 0.9,
    kv_cache_gib: Annotated[
        int, typer.Option(min=1, metavar="GIB", help="Memory for the KV cache on a CPU, in GiB.")
    ] = 1,
    start_timeout_s: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Maximum time until the server answers.")
    ] = 600.0,
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--argument",
            metavar="NAME=VALUE",
            help="Further argument of vLLM, such as max-num-batched-tokens=8192; true and false stand for a flag and "
            "its negation. Repeatable.",
        ),
    ] = None,
) -> None:
    """Run a vLLM server for training runs, whose training file names its address in engine.url.

    Prints "ready" and the address when it answers. Ctrl-C ends the server. It listens only to this machine, because its
    routes need no password.
    """
    from envkit import clock
    from envkit.config.parts import VllmEngineSection
    from envkit.wiring.training.kinds.vllm import run_server

    section = VllmEngineSection(
        model=model,
        python=python,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        gpus=[gpus] if gpus else [],
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_gib=kv_cache_gib,
        start_timeout_s=start_timeout_s,
        arguments=dict(map(_argument, arguments or ())),
    )
    clock.run(
        partial(
            run_server,
            section,
            port=port,
            max_tokens=max_tokens,
            lora_rank=lora_rank,
            announce=partial(print, file=sys.stderr, flush=True),
            on_ready=_ready,
        )
    )


def _ready(url: str) -> None:
    print(f"ready {url}", flush=True)
    print(f"in training files, set engine.kind: vllm and engine.url: {url}", file=sys.stderr, flush=True)


def _argument(text: str) -> tuple[str, str | bool]:
    name, has_value, value = text.partition("=")
    if not name or not has_value:
        raise UsageError(f"--argument {text}: write NAME=VALUE")
    return name, {"true": True, "false": False}.get(value, value)
