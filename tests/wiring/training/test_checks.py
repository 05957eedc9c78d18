"""What a training file means: its problems beyond grammar, and what its values stand for."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from envkit import clock, config, make, register, registry
from envkit.config import RunConfig
from envkit.errors import ConfigError
from envkit.runs.display import SilentDisplay
from envkit.wiring import tasks as task_sets
from envkit.wiring.training import checks, resolve
from envkit.wiring.training.run import train
from tests.cli.commands import called


def run_of(**sections: Any) -> RunConfig:
    return config.parse({"env": {"id": "FrozenLake-v0"}, **sections})


# --- Problems --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"env": {"id": "Backgammon-v0"}}, "env.id: no environment is called 'Backgammon-v0'; there are: "),
        ({"env": {"id": "FrozenLake-v0", "options": {"size": 1}}}, "env.options.size: "),
        ({"env": {"id": "FrozenLake-v0", "options": {"sise": 4}}}, "env.options.sise: "),
        (
            {"env": {"id": "FrozenLake-v0", "options": {"split": "train"}}},
            "env.options.split: training and evaluation set the split themselves; leave it out",
        ),
        ({"env": {"id": "Sokoban-v0", "options": {"boxes": 99}}}, "env.options."),
        (
            {"evaluation": {"split": "tset"}},
            "evaluation.split: FrozenLake-v0 has no split 'tset'; there are: any, eval, ",
        ),
        ({"evaluation": {"split": "train"}}, "evaluation.split: training plays the tasks of train; use a split that "),
        ({"engine": {"model": "~/nowhere"}}, f"engine.model: no model at {Path.home()}/nowhere; name a folder"),
        ({"engine": {"model": "tests"}}, "engine.model: no model at tests; name a folder"),
        (
            {"rollout": {"group_size": 1}, "algorithm": {"preset": "ppo", "advantage": "group_normalised"}},
            "rollout.group_size: ",
        ),
        (
            {"renderer": {"system": ""}},
            "renderer.system: needs a chat template, which a tiny policy does not have",
        ),
        (
            {"imitation": {"kind": "dialogues", "file": "a"}},
            "imitation.kind: dialogues need a model with a chat template; ",
        ),
        (
            {"imitation": {"kind": "dialogues", "file": "no.jsonl"}, "engine": {"model": "a/b"}},
            "imitation.file: must name a file of dialogues as JSON lines, got no.jsonl",
        ),
        (
            {"imitation": {"kind": "dialogues", "file": "pyproject.toml"}, "engine": {"model": "a/b"}},
            "imitation.file: pyproject.toml, line 1 is not a dialogue: ",
        ),
        (
            {"env": {"id": "FrozenLake-v0", "judge": "m@http://127.0.0.1:9"}},
            "env.judge: FrozenLake-v0 needs no judge; leave it out",
        ),
        ({"imitation": {"file": "no.jsonl"}}, "imitation.file: needs imitation.kind: dialogues, got auto"),
        (
            {"algorithm": {"loss": "reinforce"}},
            "algorithm.minibatches: the loss reinforce is only valid for samples of the current policy; use 1, got 2",
        ),
        (
            {"algorithm": {"correction": "tis"}},
            "algorithm.old_logprobs: the correction tis needs what the trainer computes before the first update; ",
        ),
        (
            {"rollout": {"ahead": 2, "max_lag": 1}},
            "rollout.max_lag: must be at least rollout.ahead, which is 2, or no batch could be in time; got 1",
        ),
        ({"rollout": {"max_lag": 1}}, "rollout.max_lag: no token is old while rollout.ahead is 0; "),
        (
            {"rollout": {"asynchronous": True}, "algorithm": {"preset": "reinforce"}},
            "rollout.max_lag: the loss reinforce does not bound the ratio to the weights that sampled a token; ",
        ),
        (
            {"rollout": {"asynchronous": True}, "algorithm": {"old_logprobs": "recomputed"}},
            "rollout.max_lag: recomputed log-probabilities are those of the newest weights, which hides the lag ",
        ),
        (
            {"rollout": {"replay_schedule": "tests"}},
            "rollout.replay_schedule: tests has no schedule.jsonl; name the folder of a training run",
        ),
        (
            {"env": {"id": "Arithmetic-v0"}},
            "engine.model: a tiny policy needs a list of legal moves, which Arithmetic-v0 does not give; name a model",
        ),
    ],
)
def test_a_problem_is_one_line_that_begins_with_its_key(sections: dict[str, Any], problem: str) -> None:
    found = checks.check(run_of(**sections))
    assert len(found) == 1, found
    assert found[0].startswith(problem)
    assert "\n" not in found[0]


@pytest.mark.parametrize("preset", ["grpo", "ppo", "dapo", "gspo", "cispo", "topr", "gigpo", "decoupled_ppo"])
def test_an_algorithm_that_bounds_its_ratio_may_learn_from_older_tokens(preset: str) -> None:
    found = checks.check(run_of(rollout={"asynchronous": True}, algorithm={"preset": preset}))
    assert [line for line in found if "max_lag" in line] == []


@pytest.mark.parametrize(
    ("rollout", "pace"),
    [
        ({}, (0, 0, "wait")),
        ({"asynchronous": True}, (1, 4, "wait")),
        ({"asynchronous": "fast"}, (2, 4, "resume")),
        ({"asynchronous": "fast", "ahead": 5, "lag_policy": "drop"}, (5, 5, "drop")),
        ({"asynchronous": "fast", "max_lag": 2, "lag_policy": "wait"}, (2, 2, "wait")),
    ],
)
def test_asynchronous_names_a_pace_whose_parts_can_be_set(rollout: dict[str, Any], pace: tuple[int, int, str]) -> None:
    run = run_of(rollout=rollout)
    assert checks.check(run) == []
    section = resolve.resolve(run).rollout
    assert (section.ahead, section.max_lag, section.lag_policy) == pace


def test_a_correction_lets_any_loss_learn_from_older_tokens() -> None:
    algorithm = {"preset": "reinforce", "correction": "tis", "old_logprobs": "recomputed"}
    assert checks.check(run_of(rollout={"asynchronous": True}, algorithm=algorithm)) == []


def test_a_schedule_with_fewer_train_steps_than_the_run_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "schedule.jsonl").write_text('{"step": 1, "groups": [[0, 0, 0, [0, 1]]]}\n')
    replays = {"replay_schedule": str(tmp_path)}
    assert checks.check(run_of(rollout=replays, trainer={"steps": 1})) == []
    (found,) = checks.check(run_of(rollout=replays, trainer={"steps": 2}))
    assert found.endswith("has the groups of 1 train steps; set trainer.steps to at most 1")


def test_a_kind_of_sandbox_that_does_not_work_here_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (found,) = checks.check(run_of(sandbox={"kind": "local"}))
    assert found.startswith("sandbox.kind: local does not work here: bubblewrap ")
    assert checks.check(run_of(sandbox={"kind": "auto"})) == []


def test_a_docker_daemon_that_does_not_answer_is_a_problem_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    run = run_of(sandbox={"kind": "docker"})
    problem = "sandbox.kind: docker does not work here: no Docker daemon answers: No such file or directory; "
    (found,) = clock.run(checks.check_docker, run)
    assert found.startswith(problem)
    assert clock.run(checks.check_docker, run_of(sandbox={"kind": "auto"})) == []
    with pytest.raises(ConfigError, match=problem):
        clock.run(partial(train, run, tmp_path / "run", resume=False, force=False, display=SilentDisplay()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("offline", "code", "message"),
    [
        (
            False,
            0,
            "engine.model: a/b is not in the hub's cache on this machine, so training would download it; check did",
        ),
        (
            True,
            2,
            "engine.model: a/b is not in the hub's cache, and HF_HUB_OFFLINE forbids downloads",
        ),
    ],
)
def test_a_model_of_the_hub_that_is_not_here_is_named_without_a_network(
    offline: bool, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text("{env: {id: FrozenLake-v0}, engine: {model: a/b}}")
    set_hub(monkeypatch, tmp_path / "hub", offline=offline)
    result = called("check", "run.yaml", cwd=tmp_path)
    assert (result[0], result[1]) == (code, "" if code else "ok\n")
    assert result[2].startswith(message)


def test_a_judge_to_serve_is_checked_as_a_model_with_all_problems_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_hub(monkeypatch, tmp_path / "hub", offline=False)
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    register("JudgedLake-v0", lambda judge: None, needs={"judge"})

    def judged(judge: str) -> RunConfig:
        return run_of(env={"id": "JudgedLake-v0", "judge": judge})

    for wrong in ("m@127.0.0.1:8000", "http://127.0.0.1:8000", "m@ftp://127.0.0.1"):
        (line, *_) = checks.check(judged(wrong))
        assert line.startswith(f"env.judge: {wrong}: lacks the model or the URL of a server; write MODEL@URL, such as ")
    found = checks.check(judged("~/nowhere"))
    assert [line.split(":")[0] for line in found][:1] == ["env.judge"]
    assert any(line.startswith("engine.model: a tiny policy cannot play") for line in found)
    (warning,) = checks.unverified(judged("a/b"))
    assert warning.startswith("env.judge: a/b is not in the hub's cache on this machine, so training would download it")
    assert checks.unverified(judged("m@http://127.0.0.1:9")) == []


def test_an_environment_of_gymnasium_with_a_judge_is_not_opened_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    register("JudgedGym-v0", lambda judge: make("FrozenLake-v0"), needs={"judge"})
    env = {"id": "JudgedGym-v0", "judge": "m@http://127.0.0.1:9"}
    found = checks.check(run_of(env=env, engine={"model": "a/b"}))
    assert [line for line in found if "judge" in line] == []


def test_a_cached_model_of_the_hub_gets_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "hub" / "models--a--b"
    for file, text in (("refs/main", "0123"), ("snapshots/0123/config.json", "{}")):
        (kept / file).parent.mkdir(parents=True)
        (kept / file).write_text(text)
    (tmp_path / "run.yaml").write_text("{env: {id: FrozenLake-v0}, engine: {model: a/b}}")
    set_hub(monkeypatch, tmp_path / "hub", offline=True)
    assert called("check", "run.yaml", cwd=tmp_path) == (0, "ok\n", "")


@pytest.mark.parametrize(
    ("content", "max_tokens", "fits"),
    [
        ({"max_position_embeddings": 2048}, 2048, True),
        ({"max_position_embeddings": 2048}, 2049, False),
        ({"n_positions": 1024}, 2048, False),
        ({"max_position_embeddings": 512, "text_config": {"max_position_embeddings": 4096}}, 4096, True),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 8192, True),
        ({}, 10**6, True),
    ],
)
def test_a_context_longer_than_the_models_is_named_before_the_start(
    content: dict[str, object], max_tokens: int, fits: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = checks.check(run_of(engine={"model": str(tmp_path)}, rollout={"max_tokens": max_tokens}))
    limit = next(iter(content.values()), 0)
    line = f"rollout.max_tokens: {max_tokens} is more than the {limit} positions of the model {tmp_path}; lower it"
    assert [one[: len(line)] for one in found] == ([] if fits else [line])


@pytest.mark.parametrize(("turn_tokens", "fits"), [(128, False), (64, False), (63, False), (56, True)])
def test_an_answer_that_leaves_no_room_for_a_prompt_is_named_before_the_start(
    turn_tokens: int, fits: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    rollout = {"max_tokens": 64, "turn_tokens": turn_tokens}
    problems = checks.check(run_of(engine={"model": str(tmp_path)}, rollout=rollout))
    assert [line for line in problems if "no room for a prompt" in line] == ([] if fits else problems)


def test_the_default_context_is_at_most_the_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    model = {"model": str(tmp_path)}
    assert resolve.resolve(run_of(engine=model)).rollout.max_tokens == 1024
    assert resolve.resolve(run_of()).rollout.max_tokens == 2048
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    assert resolve.resolve(run_of(engine=model)).rollout.max_tokens == 2048


def set_hub(monkeypatch: pytest.MonkeyPatch, cache: Path, *, offline: bool) -> None:
    """Set what the hub's client reads from HF_HUB_CACHE and HF_HUB_OFFLINE when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)


def test_what_only_make_takes_belongs_to_an_id_of_ones_own(tmp_path: Path) -> None:
    rooms = tmp_path / "rooms.txt"
    rooms.write_text("#####\n#@$.#\n#   #\n#   #\n#####\n")
    (problem,) = checks.check(run_of(env={"id": "Sokoban-v0", "options": {"level_file": str(rooms)}}))
    wanted = "env.options.level_file: cannot be set by reset, only by make or register(..., options=...)"
    assert problem.startswith(wanted)
    sokoban = "envkit.environments.sokoban:Sokoban"
    own = register(
        "Rooms-v0",
        sokoban,
        options={"level_file": str(rooms)},
        expert=f"{sokoban}Expert",
        compact_options={"instructions": False},
    )
    assert checks.check(run_of(env={"id": own.id})) == []


def test_a_gpu_that_is_not_there_is_a_problem() -> None:
    import torch

    reason = "device: torch finds no GPU on this machine; use device auto or cpu"
    for section in ("engine", "trainer"):
        expected = [] if torch.cuda.is_available() else [f"{section}.{reason}"]
        assert checks.check(run_of(**{section: {"device": "cuda"}})) == expected


def test_problems_of_all_sections_are_found_at_once() -> None:
    found = checks.check(
        run_of(env={"id": "Chess-v0"}, trainer={"lora": {}}, rollout={"group_size": 1}, imitation={"kind": "none"})
    )
    assert [line.partition(":")[0] for line in found] == [
        "env.id",
        "rollout.group_size",
        "trainer.lora",
        "imitation.kind",
    ]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"rollout": {"group_size": 1}, "algorithm": {"preset": "reinforce"}},
        {"rollout": {"group_size": 1}, "algorithm": {"preset": "ppo"}},
        {"algorithm": {"loss": "reinforce", "minibatches": 1}},
        {"engine": {"model": "Qwen/Qwen2.5-0.5B-Instruct"}},  # a name of the hub is not looked up
        {"engine": {"model": "gpt2"}},
        {"imitation": {"kind": "none"}, "engine": {"model": "Qwen/Qwen2.5-0.5B-Instruct"}},
    ],
)
def test_what_works_is_no_problem(sections: dict[str, Any]) -> None:
    assert checks.check(run_of(**sections)) == []


# --- Meaning ---------------------------------------------------------------------------------------------------------


def test_a_tiny_policy_reads_compact_text_answers_in_one_token_and_imitates_first() -> None:
    run = resolve.resolve(run_of())
    assert run.envs[0].options == {"instructions": False}
    assert (run.rollout.turn_tokens, run.imitation.kind) == (1, "demonstrations")
    model = resolve.resolve(run_of(engine={"model": "Qwen/Qwen2.5-0.5B-Instruct"}))
    assert model.envs[0].options == {}
    assert (model.rollout.turn_tokens, model.imitation.kind) == (128, "none")


def test_what_the_file_says_is_kept() -> None:
    run = resolve.resolve(
        run_of(
            env={"id": "FrozenLake-v0", "options": {"instructions": True, "size": 5}},
            rollout={"turn_tokens": 3},
            engine={"model": "Qwen/Qwen2.5-0.5B-Instruct"},
            imitation={"kind": "demonstrations"},
        )
    )
    assert run.envs[0].options == {"instructions": True, "size": 5}
    assert (run.rollout.turn_tokens, run.imitation.kind) == (3, "demonstrations")
    assert resolve.resolve(run) == run


def test_the_size_and_rate_of_imitation_follow_the_policy_and_the_kind() -> None:
    def found(**sections: Any) -> tuple[object, ...]:
        one = resolve.resolve(run_of(**sections)).imitation
        return one.updates, one.batch, one.states, one.learning_rate, one.check_episodes

    engine = {"model": "a/b"}
    assert found() == (600, 256, 30_000, 4e-3, 256)
    assert found(engine=engine, imitation={"kind": "demonstrations", "updates": 7}) == (7, 32, 4096, 5e-5, 0)
    assert found(engine=engine, imitation={"kind": "dialogues", "file": "a"}) == (None, 16, 4096, 5e-5, 0)


def test_tasks_of_different_splits_seeds_and_numbers_are_different() -> None:
    run = resolve.resolve(run_of())
    (section,), (spec,) = run.envs, resolve.specs_of(run)
    tasks = [
        task_sets.task(spec, section.options, split, seed, number)
        for split in ("train", "validation", "eval")
        for seed in (7, 8)
        for number in range(50)
    ]
    assert len({task.seed for task in tasks}) == len(tasks)
    assert [task.options["split"] for task in tasks[::100]] == ["train", "validation", "eval"]
    assert all(0 <= task.seed < 2**31 for task in tasks)
    assert tasks[0] == task_sets.task(spec, section.options, "train", 7, 0)
    assert tasks[0].options == {"instructions": False, "split": "train"}


@pytest.mark.parametrize(
    ("device", "files", "is_fast"),
    [
        ("cpu", {"proc/cpuinfo": "flags : fpu avx2 avx512f"}, False),
        ("cpu", {"proc/cpuinfo": "flags : fpu avx512_bf16 avx2"}, True),
        ("cpu", {"proc/cpuinfo": "Features : fp asimd bf16"}, True),
        ("cpu", {"dev/nvidiactl": "", "proc/cpuinfo": "flags : fpu avx2"}, False),
        ("auto", {"dev/nvidiactl": "", "proc/cpuinfo": "flags : fpu avx2"}, True),
        ("auto", {}, False),
        ("cuda", {}, True),
    ],
)
def test_bfloat16_is_used_only_where_it_is_fast(
    device: str, files: dict[str, str], is_fast: bool, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert resolve.has_fast_bfloat16(device, machine=tmp_path) == is_fast
