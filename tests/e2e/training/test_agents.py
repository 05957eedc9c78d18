"""A foreign agent trains on a terminal: a program in a sandbox, with Anthropic's client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import envkit
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


def test_a_program_in_a_sandbox_trains_with_the_client_of_anthropic(tmp_path: Path) -> None:
    import anthropic  # late: this takes a second, in each worker that collects the tests

    agent = {
        "command": ["python3", "-c", PROGRAM, "{task}", SOLUTION],
        "views": {"/opt/clients": str(Path(anthropic.__file__).parents[1])},
        "env": {"PYTHONPATH": "/opt/clients"},
    }
    content = {
        "env": {"id": "Terminal-v0", "num_envs": 2, "options": {"tasks": str(write_tiny(tmp_path))}},
        "agent": agent,
        "sandbox": {"kind": "local"},
        "engine": {"model": str(write_chat(tmp_path / "model", seed=5, max_tokens=8192))},
        "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 8192, "turn_tokens": 8},
        "trainer": {"steps": 2, "groups_per_step": 1},
        "evaluation": {"episodes": 0},
        "tracking": {"to": []},
        "threads": 1,
    }
    envkit.train(content, output=tmp_path / "run")
    assert [row["success"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1.0, 1.0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    fates: dict[str, int] = {name: count for name, count in summary["accounting"].items() if count}
    assert fates["asked"] == fates["trained"] == 4
    tokens = {name: count for name, count in fates.items() if name.startswith("tokens_")}
    assert tokens.pop("tokens_sampled") == sum(tokens.values())
    assert tokens.pop("tokens_masked_probe") == 4
    assert tokens.keys() == {"tokens_trained"}
