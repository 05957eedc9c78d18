"""A file of fifty questions trains a chat model without a line of code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envkit.environments.questions import QuestionTasks
from tests.cli.commands import called
from tests.trainer_bridge.models import write_chat

ROOT = Path(__file__).parents[3]
QUESTIONS = [{"prompt": f"What is {n} + {n * n}?", "answer": n + n * n} for n in range(50)]


@pytest.mark.slow
def test_fifty_questions_of_a_file_train_and_evaluate_on_different_questions(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in QUESTIONS))
    model = write_chat(tmp_path / "model", seed=5)
    keys = (
        *(f"engine.model={model}", "sandbox.kind=none", "tracking.to=[]", "tracking.trajectories_every=1"),
        *("rollout.group_size=2", "rollout.max_tokens=512", "rollout.turn_tokens=8", "trainer.steps=1"),
        *("trainer.groups_per_step=2", "threads=1", "evaluation.episodes=4"),
    )
    settings = [word for key in keys for word in ("--set", key)]
    example = ROOT / "examples" / "llm-questions.yaml"

    def envkit_prints(*words: str | Path) -> str:
        code, output, errors = called(*words, cwd=tmp_path)
        assert code == 0, output + errors
        return output

    def prompts(file: str) -> list[str]:
        episodes = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        return [episode["options"]["prompt"] for episode in episodes]

    assert envkit_prints("check", example, *settings).endswith("ok\n")
    envkit_prints("train", example, *settings, "--output", "run")
    evaluated = ("--policy", "checkpoint:run", "--episodes", "4", "--output", "found")
    envkit_prints("eval", "Questions-v0", "--option", "file=questions.jsonl", *evaluated)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["train_steps"], summary["episodes"], summary["lost_episodes"]) == (1, 4, 0)
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [(one["step"], one["eval_episodes"]) for one in evaluations] == [(0, 4), (1, 4)]
    tasks = QuestionTasks(file=str(tmp_path / "questions.jsonl"))
    splits = {
        split: {str(tasks.task(split, index).options["prompt"]) for index in range(tasks.count(split) or 0)}
        for split in tasks.splits
    }
    assert sum(len(found) for found in splits.values()) == len(set().union(*splits.values())) == len(QUESTIONS)
    trained, held_out = prompts("run/trajectories/step-1.jsonl"), prompts("found/episodes.jsonl")
    assert (len(trained), len(held_out)) == (4, 4)
    assert set(trained) <= splits["train"]
    assert set(held_out) <= splits["eval"]
