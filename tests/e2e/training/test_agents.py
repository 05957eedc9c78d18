"""Foreign agents train on a terminal: a program in a sandbox with Anthropic's client, and a function with OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import envkit
from envkit.environments.tools import write_call
from tests.e2e.training.accounts import rows
from tests.environments.terminal.tiny import SOLUTION, write_tiny
from tests.trainer_bridge.models import write_chat

pytestmark = [pytest.mark.bwrap, pytest.mark.slow, pytest.mark.xdist_group("training")]

PROGRAM = """
import subprocess, sys
import anthropic
task, solution = sys.argv[1:]
client = anthropic.Anthropic()
asked = {"model": "claude", "system": "Be brief.", "max_tokens": 64}
client.messages.create(model="claude", messages=[{"role": "user", "content": "ping"}], max_tokens=1)
messages = [{"role": "user", "content": task}]
for _ in range(2):
    with client.messages.stream(messages=messages, **asked) as stream:
        answer = stream.get_final_message()
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "Go on."}]
subprocess.run(["sh", "-c", solution], check=True)
"""
"""Calls the policy with Anthropic's client, and solves the task."""


@envkit.agent("terminal_solver")
async def solve(task: envkit.AgentTask) -> None:
    """Call the policy twice with OpenAI's client, and then play the known solution."""
    import openai  # late: this takes a second, in each worker that collects the tests

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


def test_a_program_in_a_sandbox_trains_with_the_client_of_anthropic(base: Mapping[str, Any], tmp_path: Path) -> None:
    import anthropic  # late: this takes a second, in each worker that collects the tests

    clients = str(Path(anthropic.__file__).parents[1])
    agent = {
        "command": ["python3", "-c", PROGRAM, "{task}", SOLUTION],
        "views": {"/opt/clients": clients},
        "env": {"PYTHONPATH": "/opt/clients"},
    }
    tokens = trained(base, agent, tmp_path / "run")
    assert tokens.pop("tokens_masked_probe") == 4
    assert tokens.keys() == {"tokens_trained"}


def test_a_function_trains_with_the_client_of_openai(base: Mapping[str, Any], tmp_path: Path) -> None:
    tokens = trained(base, {"function": "terminal_solver"}, tmp_path / "run")
    assert tokens.keys() == {"tokens_trained"}
