"""A chat endpoint with OpenAI's API on this machine that stands in for a model."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Answer = Callable[[dict[str, Any]], Response]


def completion(content: str | None, *, finish: str = "stop", **message: Any) -> Response:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
    return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": 30, "completion_tokens": 5}})


def failure(status: int, message: str, **headers: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status, headers=headers)


@dataclass
class Served:
    """A server: `script` answers the first requests, one each, `otherwise` all others."""

    otherwise: Answer
    script: Sequence[Answer] = ()
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    async def chat(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        self.asked.append(json.loads(await request.body()))
        number = len(self.asked) - 1
        return (self.script[number] if number < len(self.script) else self.otherwise)(self.asked[-1])

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Served]:
        app = Starlette(routes=[Route("/v1/chat/completions", self.chat, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        over = anyio.Event()
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        async def serve() -> None:
            await server.serve(sockets=[listening])
            over.set()

        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            try:
                yield self
            except Exception as error:  # raised below, because the task group would wrap it
                failure = error
            finally:
                server.should_exit = True
                await over.wait()
        if failure is not None:
            raise failure
