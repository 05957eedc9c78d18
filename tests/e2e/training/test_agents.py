"""Foreign agents train on a terminal: a program in a sandbox without a network, and a function with OpenAI's client."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

import envkit
from envkit.environments.tools import write_call
from tests.e2e.training.accounts import rows
from tests.environments.terminal.tiny import SOLUTION, write_tiny
from tests.trainer_bridge.models import write_chat

pytestmark = [pytest.mark.bwrap, pytest.mark.slow, pytest.mark.xdist_group("training")]

PROGRAM = """
import json, os, socket, subprocess, sys, urllib.request
base, (task, solution, *ports) = os.environ["OPENAI_BASE_URL"], sys.argv[1:]

def ask(messages, **fields):
    content = json.dumps({"model": "policy", "messages": messages, **fields}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", content, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]

def is_reached(host, port):
    try:
        socket.create_connection((host, port), timeout=5).close()
        return True
    except OSError:
        return False

ask([{"role": "user", "content": "ping"}], max_tokens=1)
messages = [{"role": "user", "content": task}]
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "Go on."}]
own = int(base.split(":")[2].split("/")[0])
with open("/proc/net/tcp") as file:
    listening = [int(row.split()[1].split(":")[1], 16) for row in [*file][1:] if row.split()[3] == "0A"]
others = [("127.0.0.1", int(port)) for port in ports] + [("1.1.1.1", 53), ("192.168.0.1", 80)]
if listening == [own] and is_reached("127.0.0.1", own) and not any(is_reached(*other) for other in others):
    subprocess.run(["sh", "-c", solution], check=True)
"""
"""Calls the policy, and solves the task if it reaches nothing else."""


@envkit.agent("terminal_solver")
async def solve(task: envkit.AgentTask) -> None:
    """Call the policy twice with OpenAI's client, and then play the known solution."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        for action in (write_call("bash", command=SOLUTION), write_call("submit")):
            answered = await client.chat.completions.create(
                model=task.model, messages=messages, tools=[*task.tools]  # type: ignore[list-item]
            )  # fmt: skip
            seen = await task.step(action)
            messages += [answered.choices[0].message.model_dump(), {"role": "user", "content": seen}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The sections of a training file, without the agent."""
    folder = tmp_path_factory.mktemp("agents")
    return {
        "env": {"id": "Terminal-v0", "num_envs": 2, "options": {"tasks": str(write_tiny(folder))}},
        "sandbox": {"kind": "local"},
        "engine": {"model": str(write_chat(folder / "model", seed=5, max_tokens=8192))},
        "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 8192, "turn_tokens": 8},
        "trainer": {"steps": 2, "groups_per_step": 1},
        "evaluation": {"episodes": 0},
        "tracking": {"to": []},
        "threads": 1,
    }


def trained(base: Mapping[str, Any], agent: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Train with an agent that solves all tasks; return what became of the episodes and their tokens."""
    envkit.train({**base, "agent": agent}, output=folder)
    assert [row["success"] for row in rows(folder / "metrics.jsonl")] == [1.0, 1.0]
    summary = json.loads((folder / "summary.json").read_text())
    fates: dict[str, int] = {name: count for name, count in summary["accounting"].items() if count}
    assert fates["asked"] == fates["trained"] == 4
    tokens = {name: count for name, count in fates.items() if name.startswith("tokens_")}
    assert tokens.pop("tokens_sampled") == sum(tokens.values())
    return tokens


def test_a_program_in_a_sandbox_reaches_the_policy_and_nothing_else(base: Mapping[str, Any], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # here, it is reached
        command = ["python3", "-c", PROGRAM, "{task}", SOLUTION, str(port)]
        tokens = trained(base, {"command": command}, tmp_path / "run")
    assert tokens.pop("tokens_masked_probe") == 4
    assert tokens.keys() == {"tokens_trained"}


def test_a_function_trains_with_the_client_of_openai(base: Mapping[str, Any], tmp_path: Path) -> None:
    tokens = trained(base, {"function": "terminal_solver"}, tmp_path / "run")
    assert tokens.keys() == {"tokens_trained"}
