"""`envkit.train` and `envkit.evaluate` in scripts and in notebooks, whose thread has a running event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import Mapping
from contextlib import chdir, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import envkit
from envkit import clock, config
from envkit.trainer_bridge.run_folder import plots

pytestmark = pytest.mark.xdist_group("api")


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw", lambda *_: None)  # takes longer than a run


LAKE: dict[str, Any] = {
    "env": {"id": "FrozenLake-v0", "num_envs": 8, "options": {"size": 3}},
    "sandbox": {"kind": "none"},
    "engine": {"hidden_size": 16, "layers": 1},
    "rollout": {"group_size": 2, "max_turns": 8, "max_tokens": 256},
    "trainer": {"steps": 2, "groups_per_step": 2}, "threads": 1,
    "evaluation": {"episodes": 4},
    "imitation": {"states": 20, "updates": 1, "batch": 8, "check_episodes": 0},
    "tracking": {"to": []},
}  # fmt: skip


def in_notebook(call: partial[Any]) -> Any:
    """Return the result of a blocking call in a thread with a running event loop."""

    async def cell() -> Any:
        return call()

    return clock.run(cell)


def facts(summary: envkit.TrainSummary) -> dict[str, Any]:
    """Return the fields of a summary, without those that differ between two equal runs."""
    found = {one.name: getattr(summary, one.name) for one in dataclasses.fields(summary)}
    return {name: value for name, value in found.items() if name not in ("folder", "wall_s", "content")}


def test_a_file_in_a_script_and_a_mapping_in_a_notebook_give_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "lake.yaml").write_text(yaml.safe_dump(LAKE))
    with chdir(tmp_path):
        summaries = [
            envkit.train("lake.yaml"),
            in_notebook(partial(envkit.train, LAKE)),
        ]
        for summary in summaries:
            assert json.loads((summary.folder / "summary.json").read_text()) == summary.content
            assert facts(summary) == facts(summaries[0])

    assert [str(one.folder) for one in summaries] == ["runs/lake", "runs/FrozenLake-v0"]
    first = summaries[0]
    assert (first.train_steps, first.episodes, first.stopped) == (2, 8, False)
    assert first.eval_success_after == first.content["eval_success_after"]


def test_each_train_step_is_reported_and_an_error_of_the_callback_saves_a_checkpoint(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    def on_step(step: int, values: Mapping[str, float]) -> None:
        seen.append((step, values["success"]))
        if step == 3:
            raise LookupError("good enough")

    more = {**LAKE, "trainer": {**LAKE["trainer"], "steps": 4}}
    with pytest.raises(LookupError, match="good enough"):
        envkit.train(more, output=tmp_path, on_step=on_step)

    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert seen == [(row["step"], row["success"]) for row in rows]
    assert [step for step, _ in seen] == [1, 2, 3]
    assert (tmp_path / "checkpoints/step-3").exists()
    assert envkit.train(config.parse(more), output=tmp_path, resume=True).train_steps == 4  # a config is the same run


def test_an_evaluation_returns_the_same_result_in_a_script_and_in_a_notebook(tmp_path: Path) -> None:
    evaluate = partial(envkit.evaluate, "FrozenLake-v0", "random", episodes=20, options={"size": 3})
    here, there = evaluate(output=tmp_path / "found"), in_notebook(evaluate)

    assert isinstance(here, envkit.Evaluation)
    assert (here.episodes, here.options) == (20, {"size": 3, "split": "eval"})
    assert there.metrics == here.metrics
    assert json.loads((tmp_path / "found/evaluation.json").read_text())["metrics"] == here.as_json()["metrics"]


def test_an_interrupt_in_a_notebook_saves_a_checkpoint(tmp_path: Path) -> None:
    steps = 0

    def on_step(step: int, values: Mapping[str, float]) -> None:
        nonlocal steps
        steps = step
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> None:
        more = {**LAKE, "trainer": {**LAKE["trainer"], "steps": 100_000}}
        envkit.train(more, output=tmp_path / "run", on_step=on_step)

    with closing(asyncio.new_event_loop()) as loop, pytest.raises(KeyboardInterrupt):  # a loop without a signal handler
        loop.run_until_complete(cell())

    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert steps >= 3
    assert (tmp_path / f"run/checkpoints/step-{steps}").exists()
