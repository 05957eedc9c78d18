"""The program that holds the language model of a server; `envkit.wiring.gateway.model` starts it.

It runs as ``python -m envkit.wiring.gateway.model_server SOCKET NAME [URL]``, with the URL of a vLLM server that
samples, and ends on SIGTERM.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import Literal

from envkit import clock
from envkit.config.parts import AutoRendererSection, EngineSection, TransformersEngineSection, VllmEngineSection
from envkit.errors import EnvkitError, UsageError
from envkit.http.server.server import serve
from envkit.trainer_bridge.agents.proxy import AgentProxy
from envkit.trainer_bridge.agents.served import ServedModel
from envkit.trainer_bridge.render import ChatRenderer
from envkit.wiring.contexts import EngineContext, RendererContext, open_part
from envkit.wiring.training.models import locate, positions_of
from envkit.wiring.training.resolve import has_fast_bfloat16

MAX_TOKENS = 8192
"""Maximum number of tokens of a prompt with its answer, if the model does not say how many positions it has."""
TURN_TOKENS = 4096
"""Maximum number of tokens of an answer. A request may ask for fewer."""


async def serve_model(socket: str, name: str, url: str | None = None) -> None:
    """Load a model and answer calls on a Unix socket, until SIGTERM.

    Raises:
        UsageError: The model does not exist or has no chat template, or the engine cannot be opened.
    """
    from envkit.wiring.training.torch_parts import find_model

    model = await clock.to_thread(partial(find_model, locate(name)))
    max_tokens = positions_of(name) or MAX_TOKENS
    section: EngineSection = VllmEngineSection(model=name, url=url)
    if url is None:
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if has_fast_bfloat16("auto") else "float32"  # as in training
        section = TransformersEngineSection(model=name, dtype=dtype)
    async with AsyncExitStack() as parts:
        opened = RendererContext(section=AutoRendererSection(), model=model)
        renderer = await open_part(parts, "renderers", "auto", opened)
        if not isinstance(renderer, ChatRenderer):
            raise UsageError(f"{name} has no chat template")
        context = EngineContext(section=section, model=model, max_tokens=max_tokens, threads=0, seed=0)
        engine = await open_part(parts, "engines", section.kind, context)
        tasks = await parts.enter_async_context(clock.background_tasks())
        await serve(AgentProxy(model=ServedModel(engine, renderer, max_tokens, TURN_TOKENS, tasks)), uds=socket)


def main() -> None:
    try:
        clock.run(partial(serve_model, *sys.argv[1:]), fast=True)
    except EnvkitError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
