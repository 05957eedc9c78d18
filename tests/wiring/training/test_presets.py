"""Presets train a tiny policy on the lake for some train steps, and the diagnostics find nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from envkit.config import parse
from envkit.config.algorithm import PRESETS
from envkit.runs.display import SilentDisplay
from envkit.runs.files import read_rows
from envkit.trainer_bridge.run_folder import plots
from envkit.wiring.training.run import train

LAKE: Mapping[str, Any] = {
    "env": {"id": "FrozenLake-v0", "options": {"size": 3, "slip": 0.0, "max_moves": 6}},
    "threads": 1,
    "sandbox": {"kind": "none"},
    "rollout": {"group_size": 4, "max_turns": 6, "max_tokens": 128},
    "evaluation": {"episodes": 0},
    "tracking": {"to": []},
}


def run(content: Mapping[str, Any], folder: Path) -> None:
    async def main() -> None:
        await train(parse({**LAKE, **content}), folder, resume=False, force=False, display=SilentDisplay())

    anyio.run(main)


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw", lambda *_: None)  # takes longer than the run


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a policy that has imitated for a while."""
    folder = tmp_path_factory.mktemp("imitation") / "run"
    content = {
        "engine": {"hidden_size": 16, "layers": 1},
        "trainer": {"steps": 0},
        "imitation": {"states": 64, "batch": 16, "updates": 20, "check_episodes": 0},
    }
    run(content, folder)
    return str(next(folder.glob("checkpoints/*/policy")))


OTHER_KEYS = {"grpo", "dr_grpo", "dapo", "rebn", "ppo", "lite_ppo"}
"""Presets whose parts are those of others with different keys, which `tests/golden` shows."""


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in OTHER_KEYS])
def test_a_preset_trains_without_a_finding(preset: str, policy: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    content = {
        "engine": {"model": policy},
        "imitation": {"kind": "none"},
        "algorithm": {"preset": preset},
        "trainer": {"steps": 4, "groups_per_step": 4, "learning_rate": 0.001},
    }
    run(content, folder)
    rows: list[Any] = list(read_rows(folder / "metrics.jsonl"))
    assert len(rows) == 4
    assert sum(row["updates"] for row in rows) > 3
    assert sum(row["nonfinite_updates"] for row in rows) == 0
    assert json.loads((folder / "summary.json").read_text())["diagnosis"] == []
