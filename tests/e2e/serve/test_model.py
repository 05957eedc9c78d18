"""``envkit serve --model``: agents elsewhere call a model of this machine through the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from envkit import clock
from tests.e2e.serve.gateway import gateway
from tests.trainer_bridge.models import write_chat

USER: Any = {"role": "user", "content": "up"}


def processes_of(pid: int) -> list[int]:
    """Return the pids of the processes that descend from `pid`."""
    children = [map(int, (task / "children").read_text().split()) for task in Path(f"/proc/{pid}/task").iterdir()]
    return [found for child in chain(*children) for found in (child, *processes_of(child))]


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_clients_of_openai_and_anthropic_call_the_model_with_a_token_and_it_comes_back_after_a_kill(
    tmp_path: Path,
) -> None:
    import anthropic  # late: this takes a second, in each worker that collects the tests
    import openai

    model = write_chat(tmp_path / "model", seed=5, max_tokens=120)
    config = {"backend": "none", "listen": {"port": 0}, "model": str(model)}
    with gateway(tmp_path, json.dumps(config), popen=subprocess.Popen) as server:  # a forked one has torch
        token = server.token("ann", "play")
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=token, max_retries=0) as ours,
            anthropic.Anthropic(base_url=server.url, api_key=token, max_retries=0) as theirs,
        ):
            assert until_another_status(server.url, token, 503) == 200  # it loads in the background
            ask: Any = partial(ours.chat.completions.create, model="any", messages=[USER], temperature=0, max_tokens=8)
            chat = ask()
            assert chat.usage.completion_tokens <= 8
            assert "".join(one.choices[0].delta.content or "" for one in ask(stream=True)) == text_of(chat)
            assert ours.responses.create(
                model="any", input="up", temperature=0, max_output_tokens=8
            ).output_text == text_of(chat)
            assert theirs.messages.create(model="any", messages=[USER], max_tokens=3).usage.output_tokens <= 3
            assert theirs.messages.count_tokens(model="any", messages=[USER]).input_tokens == chat.usage.prompt_tokens

            with pytest.raises(openai.BadRequestError, match="maximum context"):
                ask(messages=[{"role": "user", "content": "up " * 400}])
            with pytest.raises(openai.AuthenticationError):
                ours.with_options(api_key="ek_000000000000_" + "x" * 43).models.list()
            with pytest.raises(openai.PermissionDeniedError, match="scope play"):
                ours.with_options(api_key=server.token("bob", "sandbox")).models.list()

            assert not has_torch(server.process_id)
            (process,) = [pid for pid in processes_of(server.process_id) if has_torch(pid)]
            os.kill(process, signal.SIGKILL)
            assert until_another_status(server.url, token, 200) == 503
            assert until_another_status(server.url, token, 503) == 200
            assert text_of(ask()) == text_of(chat)


def text_of(chat: Any) -> str:
    return str(chat.choices[0].message.content)


def until_another_status(url: str, token: str, status: int) -> int:
    """Ask for the list of models until the answer has another status than `status`; return that."""

    async def main() -> int:
        async with httpx.AsyncClient(base_url=url, headers={"x-api-key": token}) as client:
            with anyio.fail_after(60):
                while (  # noqa: ASYNC110 - the server has no event for it
                    found := (await client.get("/v1/models")).status_code
                ) == status:
                    await anyio.sleep(0.02)
                return found

    return clock.run(main)
