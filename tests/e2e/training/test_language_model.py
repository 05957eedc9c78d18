"""End-to-end training of a real language model, from its name to a better policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import called
from tests.trainer_bridge.models import write_chat

ROOT = Path(__file__).parents[3]
SANDBOXED = ("llm-code", "llm-terminal")
"""The examples whose environment needs sandboxes."""
EXAMPLES = [
    pytest.param(path.stem, marks=[pytest.mark.bwrap] if path.stem in SANDBOXED else [])
    for path in sorted((ROOT / "examples").glob("llm-*.yaml"))
]
DIALOGUES = [{"messages": [{"role": role, "content": "up"} for role in ("user", "assistant")]}] * 40
FILES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    **dict.fromkeys(SANDBOXED, ("imitation.file", DIALOGUES)),
    "llm-questions": ("env.options.file", [{"prompt": f"What is {n} * 3?", "answer": 3 * n} for n in range(40)]),
}
"""Examples that read a file of JSON lines: the key that names it, and its lines."""
NO_SANDBOX = ("sandbox.kind=none", "tracking.to=[]", "threads=1")


def train(example: str, folder: Path, *changes: str) -> dict[str, Any]:
    """Run an example with changed keys and return its summary."""
    words = [word for change in (*NO_SANDBOX, *changes) for word in ("--set", change)]
    file = ROOT / "examples" / f"{example}.yaml"
    code, output, errors = called("train", file, "--output", folder, *words)
    assert code == 0, output + errors
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.model
def test_a_language_model_imitates_and_then_learns_from_reward(tmp_path: Path, smollm2: Path) -> None:
    lessons = ("imitation.states=32", "imitation.updates=3", "imitation.batch=8")
    small = ("trainer.steps=2", "trainer.groups_per_step=2", "rollout.group_size=4", "evaluation.episodes=0")
    easy = ("env.options.size=2", "env.options.max_moves=4", "trainer.schedule=linear")
    summary = train("llm-lake", tmp_path / "run", f"engine.model={smollm2}", *lessons, *small, *easy)

    assert summary["imitation"]["updates"] == 3
    assert summary["train_steps"] == 2
    assert summary["episodes"] == 2 * 2 * 4
    rows = metrics(tmp_path / "run")
    # Untrained, it answers in prose; a few updates are enough to name a move most of the time.
    assert rows[0]["action_is_valid"] > 0.5
    assert [row["policy_version"] for row in rows] == [0, 1]  # the second step was played by what the first learned
    assert [row["learning_rate"] for row in rows] == [1e-5, 5e-6]  # it falls to 0 over the train steps
    assert any(row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_a_language_model_runs_with_any_model_that_chats(example: str, tmp_path: Path) -> None:
    model = write_chat(tmp_path / "model", seed=5, max_tokens=1024)
    changes = [f"engine.model={model}", "trainer.steps=1", "trainer.groups_per_step=1", "evaluation.episodes=1"]
    changes += ["rollout.max_tokens=1024", "rollout.turn_tokens=4", "rollout.group_size=2"]
    if example in FILES:
        key, lines = FILES[example]
        (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        changes.append(f"{key}={tmp_path / 'lines.jsonl'}")
    elif "arithmetic" not in example:
        changes += ["imitation.states=16", "imitation.updates=1", "imitation.batch=4"]
    if example in SANDBOXED:
        changes.append("sandbox.kind=local")
    summary = train(example, tmp_path / "run", *changes)

    assert summary["train_steps"] == 1
    assert summary["lost_episodes"] == 0
