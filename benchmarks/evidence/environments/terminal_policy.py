"""Train SmolLM2-135M-Instruct to write shell scripts for the easiest tasks of five families of Terminal-v0.

    envkit model get smollm2-135m
    python benchmarks/evidence/environments/terminal_policy.py

Trains ``examples/llm-terminal.yaml`` with one thread: imitation of the solutions of 1,000 training tasks, then GRPO.
Before and after, the model plays tasks of the same families with held-out seeds, and tasks of the held-out families,
eight times each, sampled at temperature 1. All answers are scripts (``mode="script"``) of difficulty 1. The learning
curve begins after the imitation. Takes about an hour on one quiet core.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import ROOT, Evidence, parser, run

from benchmarks.training.runs import MODEL, figures
from envkit import evaluate

NAME = "terminal-policy"
STALE_AFTER = (
    "environments/terminal/families",
    "examples/llm-terminal.yaml",
    "trainer_bridge/algorithms",
    "trainer_bridge/sources",
    "trainer_bridge/trainers",
)
TWIN = "tests/environments/terminal/test_env.py::test_a_script_is_the_whole_episode"
EXAMPLE = ROOT / "examples" / "llm-terminal.yaml"
TASKS, ATTEMPTS, DIALOGUES = 24, 8, 1000


def play(policy: str, families: Any, turn_tokens: int, folder: Path) -> dict[str, Any]:
    """Let a policy play tasks of the split ``eval``, and return its metrics as mean and bounds of the 95 % interval."""
    options = {"mode": "script", "difficulty": 1, "families": families}
    asked: dict[str, Any] = {"options": options, "episodes": TASKS, "attempts": ATTEMPTS, "backend": "local"}
    if policy.startswith("model:"):
        asked |= {"turn_tokens": turn_tokens, "max_turns": 1, "system": ""}
    found = evaluate("Terminal-v0", policy, output=folder, **asked)
    return {
        "tasks": TASKS,
        "attempts": ATTEMPTS,
        "void": found.void,
        **{name: found.metrics[name] for name in ("success", f"pass@{ATTEMPTS}", "action_is_valid")},
    }


def train(families: Any, folder: Path) -> dict[str, Any]:
    """Train in `folder`, or continue there, and return the learning curve."""
    os.environ["OMP_NUM_THREADS"] = "1"
    dialogues, output = folder / "terminal.jsonl", folder / "run"
    envkit = [sys.executable, "-m", "envkit"]
    options = ["mode=script", "difficulty=1", f"families={json.dumps(families)}"]
    if not dialogues.exists():
        words = ["eval", "Terminal-v0", "--policy", "oracle", "--split", "train", "--episodes", str(DIALOGUES)]
        more = [word for option in options for word in ("--option", option)]
        if run([*envkit, *words, *more, "--backend", "local", "--dialogues", dialogues], ROOT)["exit_code"]:
            raise SystemExit("the oracle did not play")
    resume = ["--resume"] if output.exists() else []
    words = ["train", EXAMPLE, "--output", output, "--set", f"imitation.file={dialogues}", *resume]
    if run([*envkit, *words], ROOT)["exit_code"]:
        raise SystemExit("the training failed")
    return figures(output)


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--runs", type=Path, help="folder for the training and the episodes; default: a new one")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    example = yaml.safe_load(EXAMPLE.read_text())
    families, turn_tokens = example["env"]["options"]["families"], example["rollout"]["turn_tokens"]
    with TemporaryDirectory() as scratch:
        runs: Path = (asked.runs or Path(scratch)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        for name, policy in (("untrained", f"model:{MODEL}"), ("trained", f"checkpoint:{runs / 'run'}")):
            if name == "trained":
                evidence.part("training", partial(train, families, runs))
            for what, chosen in (("held-out seeds", families), ("held-out families", "held_out")):
                folder = runs / f"{name}-{what.replace(' ', '-')}"
                print(evidence.part(f"{name}, {what}", partial(play, policy, chosen, turn_tokens, folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
