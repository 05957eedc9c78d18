"""The training files for GPUs: `envkit check` accepts them, and small twins of them train on a CPU."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from envkit import clock, config
from envkit.runs.display import SilentDisplay
from envkit.wiring.training.checks import check
from envkit.wiring.training.run import train
from tests.trainer_bridge.models import write_chat

FILES = sorted((Path(__file__).parents[3] / "examples/gpu").glob("*.yaml"))


@pytest.mark.vllm
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_check_accepts_a_file_for_gpus(file: Path) -> None:
    assert check(config.load(file)) == []


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_small_twin_of_a_file_for_gpus_trains(file: Path, tmp_path: Path) -> None:
    """The twin has a random Qwen2 with two layers, one train step, and two short turns; all else is the file's."""
    model = write_chat(tmp_path / "model", seed=1, max_tokens=8192)
    content: dict[str, Any] = yaml.safe_load(file.read_text())
    content["env"]["num_envs"] = 4
    content["engine"] = {"kind": "transformers", "model": str(model), "dtype": "float32", "device": "cpu"}
    content["rollout"] |= {"group_size": 2, "max_turns": 2, "turn_tokens": 8}
    content["trainer"] |= {"steps": 1, "groups_per_step": 2, "precision": "float32"}
    content["threads"] = 1
    content["evaluation"] = {"episodes": 0}
    content["sandbox"] = {"kind": "none"}
    run = config.parse(content)
    clock.run(partial(train, run, tmp_path / "run", resume=False, force=False, display=SilentDisplay()))
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["episodes"] == 4
    # No random model solves a task, so a group has nothing to learn from; only a critic and a KL term learn.
    assert row["samples"] >= 4
    assert (tmp_path / "run/checkpoints/step-1/policy").is_dir()
