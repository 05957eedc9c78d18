"""Training files with a list of environments: tasks by weight, checks, policies and imitation for each of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envkit import TrainSummary, clock, config, register, registry
from envkit.config import RunConfig, evaluation
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.models.saved_policy import SavedPolicy
from envkit.types import JSON, Observation, Task, stable_hash
from envkit.wiring import environments
from envkit.wiring import tasks as task_sets
from envkit.wiring.evaluation.contestant import FoundPolicy
from envkit.wiring.evaluation.local_models import find_local
from envkit.wiring.training import checks, resolve
from envkit.wiring.training.run import train
from tests.trainer_bridge.models import write_tiny
from tests.trainer_bridge.policies import open_policy

LAKE: dict[str, Any] = {"id": "FrozenLake-v0", "num_envs": 8, "options": {"size": 3}}
LAKE_EXPERT = "envkit.environments.frozen_lake:FrozenLakeExpert"
SOKOBAN: dict[str, Any] = {
    "id": "Sokoban-v0",
    "num_envs": 8,
    "options": {"size": 5, "moves": [1, 3], "max_moves": 4},
}


def run_of(*envs: dict[str, Any], **sections: Any) -> RunConfig:
    return config.parse({"env": list(envs), **sections})


# --- Tasks -----------------------------------------------------------------------------------------------------------


def test_a_run_with_one_environment_has_the_tasks_of_its_seed_whatever_its_weight() -> None:
    for env in (LAKE, {**LAKE, "weight": 0.3}, [LAKE]):
        run = config.parse({"env": env})
        (section,), (spec,) = run.envs, resolve.specs_of(run)
        tasks = [task_sets.task(spec, section.options, "train", 7, number) for number in range(20)]
        options: dict[str, JSON] = {"size": 3, "split": "train"}
        expected = [Task("FrozenLake-v0", stable_hash(7, "train", number) >> 33, options) for number in range(20)]
        assert tasks == expected


def test_names_are_ids_and_those_that_occur_several_times_have_an_index() -> None:
    larger = {**LAKE, "options": {"size": 5}}
    assert resolve.names_of(run_of(LAKE, SOKOBAN)) == ["FrozenLake-v0", "Sokoban-v0"]
    assert resolve.names_of(run_of(LAKE, SOKOBAN, larger)) == ["FrozenLake-v0.0", "Sokoban-v0", "FrozenLake-v0.2"]


@pytest.mark.parametrize(
    ("weights", "total", "parts"),
    [((1, 1), 5, [2, 3]), ((3, 1), 64, [48, 16]), ((1, 1, 1), 10, [3, 4, 3]), ((9,), 7, [7])],
)
def test_demonstrations_are_divided_by_weight(weights: tuple[float, ...], total: int, parts: list[int]) -> None:
    assert resolve.parts_of(run_of(*({**LAKE, "weight": weight} for weight in weights)), total) == parts


# --- Checks ----------------------------------------------------------------------------------------------------------


def test_the_problems_of_every_environment_are_found_and_name_its_place_in_the_list() -> None:
    assert checks.check(run_of(LAKE, SOKOBAN)) == []
    run = run_of({"id": "FrozenLak-v0"}, LAKE, {**LAKE, "options": {"size": 1}}, {**LAKE, "options": {"split": "a"}})
    found = [problem.partition(": ")[0] for problem in checks.check(run)]
    assert found == ["env.0.id", "env.2.options.size", "env.3.options.split"]


def test_a_tiny_policy_needs_an_expert_in_every_environment() -> None:
    own = register("ExpertlessLake-v0", "envkit.environments.frozen_lake:FrozenLake")
    (problem,) = checks.check(run_of(LAKE, {"id": own.id}))
    assert problem.startswith("imitation.kind: ExpertlessLake-v0 has no expert to demonstrate")


# --- Policies --------------------------------------------------------------------------------------------------------


def test_a_tiny_policy_reads_compact_text_of_every_environment_and_knows_all_their_words() -> None:
    run = resolve.resolve(run_of(LAKE, SOKOBAN, engine={"hidden_size": 16, "layers": 1, "device": "cpu"}, threads=1))
    assert [section.options["instructions"] for section in run.envs] == [False, False]
    assert resolve.resolve(run) == run
    policy = open_policy(run)
    for section in run.envs:
        with environments.make(section.id) as env:
            for seed in range(20):
                text, info = env.reset(seed=seed, options={**section.options})
                assert policy.tokenizer.unk_token_id not in policy.renderer.open(Observation(text))
                moves = [policy.renderer.demonstrate(f"<answer>{move}</answer>") for move in info["legal_moves"]]
                assert {len(move) for move in moves} == {1}


def words_of(*, size: int, **options: JSON) -> list[str]:
    return ["ice", "cold and wet", f"{size} fish"]


def test_a_tiny_policy_knows_the_vocabulary_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(registry, "_SPECS", dict(registry._SPECS))
        register("WordyLake-v0", "envkit.environments.frozen_lake:FrozenLake", expert=LAKE_EXPERT, vocabulary=words_of)
        engine = {"hidden_size": 16, "layers": 1, "device": "cpu"}
        policy = open_policy(resolve.resolve(run_of({**LAKE, "id": "WordyLake-v0"}, engine=engine)))
    unknown = policy.tokenizer.unk_token_id
    assert unknown not in policy.renderer.open(Observation("cold and wet ice\n3 fish"))
    assert unknown in policy.renderer.open(Observation("bears"))
    with environments.make("FrozenLake-v0", size=3, instructions=False) as env:
        for seed in range(100):
            assert unknown not in policy.renderer.open(Observation(env.reset(seed=seed)[0]))


def found(kind: str, name: object, env_id: str) -> FoundPolicy:
    return find_local(evaluation.parse({"env": {"id": env_id}, "policy": f"{kind}:{name}"}), kind, str(name))


def test_a_saved_policy_records_every_environment_that_it_was_trained_in(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "policy", seed=1)
    saved = SavedPolicy(True, "FrozenLake-v0", {"size": 3}, 2, {}, {"Sokoban-v0": {"size": 5}})
    saved.write(folder)
    assert SavedPolicy.read(folder) == saved
    engine = {"model": str(folder)}
    run = resolve.resolve(run_of({"id": "Sokoban-v0"}, {"id": "FrozenLake-v0", "options": {"size": 4}}, engine=engine))
    assert [section.options["size"] for section in run.envs] == [5, 4]
    assert run.rollout.turn_tokens == 2
    sokoban, other = (found("model", folder, env_id) for env_id in ("Sokoban-v0", "Arithmetic-v0"))
    assert (sokoban.options["size"], sokoban.warning) == (5, "")
    warning = "warning: the policy was trained on FrozenLake-v0, Sokoban-v0 and plays Arithmetic-v0 with rollout."
    assert other.warning.startswith(warning)


def test_a_checkpoint_is_evaluated_in_each_environment_with_its_options(tmp_path: Path) -> None:
    policy = write_tiny(tmp_path / "checkpoints" / "step-1" / "policy", seed=1)
    SavedPolicy(True, "FrozenLake-v0", {}, other_envs={"Sokoban-v0": {}}).write(policy)
    (tmp_path / "config.yaml").write_text(config.dump(resolve.resolve(run_of(LAKE, SOKOBAN, {**LAKE, "options": {}}))))
    lake, sokoban, other = (
        found("checkpoint", tmp_path, env_id) for env_id in ("FrozenLake-v0", "Sokoban-v0", "Arithmetic-v0")
    )
    assert (lake.options["size"], sokoban.options["size"], other.options) == (3, 5, {})
    assert (sokoban.warning, sokoban.at_once) == ("", 24)


# --- A run -----------------------------------------------------------------------------------------------------------


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows without the values that depend on the machine."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(("_s", "_mib"))} for line in lines]


@pytest.mark.slow
def test_a_run_in_two_environments_trains_and_evaluates_both(tmp_path: Path) -> None:
    run = run_of(
        LAKE,
        {**SOKOBAN, "weight": 2},
        sandbox={"kind": "process"},
        engine={"hidden_size": 16, "layers": 1},
        rollout={"group_size": 2, "max_turns": 4, "max_tokens": 256},
        trainer={"steps": 2, "groups_per_step": 6},
        threads=1,
        evaluation={"episodes": 6, "every": 1},
        imitation={"states": 30, "updates": 48, "batch": 8, "check_episodes": 6},
    )
    whole = tmp_path / "whole"
    clock.run(partial(train, run, whole, resume=False, force=False, display=SilentDisplay()))
    for row in rows(whole / "metrics.jsonl"):
        assert row["episodes/FrozenLake-v0"] + row["episodes/Sokoban-v0"] == row["episodes"] == 12
    for row in rows(whole / "evaluations.jsonl"):
        counts = [row[f"eval_episodes{suffix}"] for suffix in ("", "/FrozenLake-v0", "/Sokoban-v0")]
        assert counts == [12, 6, 6]
        each = [row[f"eval_success/{name}"] for name in ("FrozenLake-v0", "Sokoban-v0")]
        assert row["eval_success"] == pytest.approx(sum(each) / 2)
    summary = json.loads((whole / "summary.json").read_bytes())
    assert (summary["env_ids"], "env_id" in summary) == (["FrozenLake-v0", "Sokoban-v0"], False)
    assert TrainSummary.of(whole, summary).env_id == "FrozenLake-v0"
    last = rows(whole / "evaluations.jsonl")[-1]
    for name, values in summary["environments"].items():
        assert values["eval_success_after"] == last[f"eval_success/{name}"]
        assert values["eval_greedy_after"] == last[f"eval_greedy/{name}"]
    assert list(summary["environments"]) == summary["env_ids"]
    assert 0 < summary["imitation"]["demonstrator_success"] <= 1
    saved = SavedPolicy.read(whole / "checkpoints" / "step-2" / "policy")
    assert saved is not None
    assert saved.env_ids == ["FrozenLake-v0", "Sokoban-v0"]
    assert (whole / "plots" / "learning_curve.png").exists()
