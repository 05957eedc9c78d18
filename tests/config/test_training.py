"""The grammar of a training file: every problem at once, one line each, starting with the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from envkit import config
from envkit.cli.environments.options import read_options
from envkit.config import RunConfig, grammar, serving
from envkit.config.parts import TensorBoardSection, TorchTrainerSection
from envkit.errors import ConfigError

MINIMAL = "env: {id: FrozenLake-v0}\n"
CLIPPED = {"kind": "clipped", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}


def load(folder: Path, text: str, *overrides: str) -> config.RunConfig:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return config.load(path, overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    assert all("\n" not in problem for problem in caught.value.problems)
    return list(caught.value.problems)


# --- Files -----------------------------------------------------------------------------------------------------------


def test_only_the_environments_id_is_required(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL)
    assert (run.envs[0].id, run.seed, run.algorithm.preset, run.engine.model) == ("FrozenLake-v0", 7, "grpo", None)


def test_what_is_dumped_is_read_again_as_the_same(tmp_path: Path) -> None:
    text = "env: {id: Sokoban-v0, options: {size: 6, boxes: 1, words: [ä, '✓']}}\n"
    text += "algorithm: {preset: ppo, loss: {clip_low: 0.3}}\n"
    run = load(tmp_path, text)
    dumped = config.dump(run)
    assert load(tmp_path, dumped) == run
    assert config.dump(load(tmp_path, dumped)) == dumped
    assert "✓" in dumped


def test_several_environments_are_a_list_and_one_is_as_it_was_written(tmp_path: Path) -> None:
    one = load(tmp_path, "env: {id: Sokoban-v0, num_envs: 3}")
    assert (one.env, one.num_envs) == (one.envs[0], 3)
    assert "\nenv:\n  id: Sokoban-v0\n" in config.dump(one)
    several = load(tmp_path, "env:\n- {id: Sokoban-v0, num_envs: 3}\n- {id: FrozenLake-v0, weight: 2, num_envs: 5}\n")
    assert [(section.id, section.weight) for section in several.envs] == [("Sokoban-v0", 1), ("FrozenLake-v0", 2)]
    assert several.num_envs == 8
    assert load(tmp_path, config.dump(several)) == several


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e-6", 1e-6),
        ("1.5e2", 150),
        (".5", 0.5),
        ("+3", 3),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        ("12:30", "12:30"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("'1e3'", "1e3"),
    ],
)
def test_numbers_are_read_as_people_write_them_and_a_dumped_value_is_read_back(text: str, number: float | str) -> None:
    read = grammar.read_yaml(f"a: {text}")["a"]
    assert (read, type(read)) == (number, type(number))
    assert grammar.read_yaml(grammar.write_yaml({"a": read})) == {"a": read}
    assert read_options([f"a={text}"]) == {"a": number}


def test_the_home_folder_is_put_for_a_tilde(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL.replace("}", ", url: http://h, token_file: ~/t, ca: ~/c}") + "engine: {model: ~/m}")
    assert (run.envs[0].token_file, run.envs[0].ca) == (str(Path("~/t").expanduser()), str(Path("~/c").expanduser()))
    assert run.engine.model == str(Path("~/m").expanduser())


def test_a_whole_number_is_a_number_and_yes_is_a_boolean_as_yaml_has_it(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL + "rollout: {step_timeout_s: 12}\ntrainer: {gradient_checkpointing: no}")
    assert isinstance(run.trainer, TorchTrainerSection)
    assert (run.rollout.step_timeout_s, run.trainer.gradient_checkpointing) == (12.0, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env: {id: x", "line 1, column 12: not YAML: the '{' of line 1, column 6 has no '}'"),
        (
            "seed: 1\nenv: {id: x, options: [ab",
            "line 2, column 26: not YAML: the '[' of line 2, column 23 has no ']'",
        ),
        ("env:\n\tid: x", "line 2, column 1: not YAML: a tab; indent with spaces"),
        (
            "a: b: c",
            "line 1, column 5: not YAML: unexpected ': '; quote the value",
        ),
        ("env: 'x", "line 1, column 8: not YAML: the quote of line 1, column 6 is not closed"),
        ("env:\n  id: x\n trainer: 3", "line 3, column 2: not YAML: not indented like the lines above it"),
        ("env: {id: x}\nseed 3\ntrainer: {}", "line 3, column 1: not YAML: line 2 has no ': ' after its key"),
        ("env: *nobody", "line 1, column 6: not YAML: found undefined alias 'nobody'"),
        ("env: !!python/none x", "line 1, column 6: not YAML: "),
        ("env: \x01", "not YAML: it contains a control character"),
    ],
)
def test_what_is_not_yaml_is_named_with_its_place_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, text)
    assert problem.startswith(f"{tmp_path}/run.yaml: {message}")


def test_a_key_that_stands_twice_in_one_place_is_named_with_its_lines(tmp_path: Path) -> None:
    text = "env: {id: FrozenLake-v0}\nseed: 1\nrollout:\n  group_size: 4\nseed: 2\n"
    assert problems(tmp_path, text) == [
        f"{tmp_path}/run.yaml: line 5, column 1: not YAML: duplicate key seed (first in line 2); remove one of the two"
    ]
    assert grammar.read_yaml("a: {z: &z {k: 2}, y: &y {<<: *z, k: 1}}\nb: {<<: *y}")["a"]["y"] == {"k": 1}
    (problem,) = problems(tmp_path, MINIMAL, "rollout={group_size: 4, group_size: 8}")
    assert problem.startswith("rollout: '{group_size: 4, group_size: 8}' is not YAML: duplicate key group_size (first")


def test_a_fleets_file_has_its_repeated_keys_named_and_may_have_one_key_in_several_places(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("warm:\n- &small {count: 1, memory_mib: 64}\n- *small\n- {count: 1}\n")
    assert [stock.memory_mib for stock in serving.read(path, [], {}).warm] == [64, 64, None]
    path.write_text("node:\n  max_sandboxes: 4\n  max_sandboxes: 400\n")
    with pytest.raises(ConfigError) as caught:
        serving.read(path, [], {})
    assert caught.value.problems == (
        f"{path}: line 3, column 3: not YAML: duplicate key max_sandboxes (first in line 2); remove one of the two",
    )


@pytest.mark.parametrize(
    "setting",
    [
        "state=''",
        "listen.host=''",
        "listen.socket=''",
        "nodes=[{url: ''}]",
        "envs.image=''",
        "limits.networks=['']",
        "limits.networks=['http://example.org/']",
        "limits.images=['']",
        "alerts.webhook=http://example.org:99999/",
        "alerts.webhook='http://[::1/'",
        "alerts.webhook=http://:80/",
    ],
)
def test_what_is_empty_and_addresses_that_are_none_are_refused_before_a_fleet_starts(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting.partition('=')[0]}"):
        serving.read(None, [setting], {})


def test_a_section_with_nothing_in_it_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    names = ("listen", "node", "nodes", "envs", "warm", "liveness", "restarts", "limits", "alerts")
    path = tmp_path / "fleet.yaml"
    path.write_text("backend: local\n" + "".join(f"{name}:\n" for name in names))
    assert serving.read(path, [], {}) == serving.read(None, ["backend=local"], {})
    found = serving.read(path, ["node.max_sandboxes=3"], {"listen.port": 0})
    assert (found.listen.port, found.listen.host, found.node.max_sandboxes) == (0, "127.0.0.1", 3)
    others = ("sandbox", "engine", "rollout", "algorithm", "trainer", "evaluation", "imitation", "tracking")
    assert load(tmp_path, MINIMAL + "".join(f"{name}:\n" for name in others)) == load(tmp_path, MINIMAL)
    nested = load(tmp_path, MINIMAL + "sandbox:\n  liveness:\n", "sandbox.restarts.budget=6")
    assert (nested.sandbox.liveness.lost_s, nested.sandbox.restarts.budget) == (4.0, 6)
    assert problems(tmp_path, "env:\n") == ["env: must hold keys and values"]
    assert problems(tmp_path, MINIMAL + "sandbox: 3\n") == ["sandbox: must hold keys and values, got 3"]


# --- Keys and values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("env: {id: x, num_env: 3}", "env.num_env: no such key; did you mean 'num_envs'?"),
        ("env: {id: x}\ntrainer: {q: 1}", "trainer.q: no such key; there are: "),
        (
            "env: {id: x}\nsandbox: {liveness: {lost: 3}}",
            "sandbox.liveness.lost: no such key; did you mean 'lost_s'?",
        ),
        ("env: {id: x}\n3: 4", "3: "),
        ("env: {id: x}\ntrainer: {steps: true}", "trainer.steps: must be a whole number, got True"),
        ("env: {id: x}\nrollout: {step_timeout_s: '12'}", "rollout.step_timeout_s: must be a number, got '12'"),
        (
            "env: {id: x}\ntrainer: {gradient_checkpointing: 'yes'}",
            "trainer.gradient_checkpointing: must be true or false",
        ),
        ("env: {id: x}\ntracking: {to: [3]}", "tracking.to.0: must hold keys and values, got 3"),
        ("env: {id: x}\ntracking: {to: [{}]}", "tracking.to.0.kind: is missing"),
        (
            "env: {id: x}\ntracking: {to: [tensorbord]}",
            "tracking.to.0.kind: no tracker is called 'tensorbord'; did you mean 'tensorboard'?",
        ),
        ("env: {id: x}\ntrainer: {steps: -1}", "trainer.steps: must be at least 0, got -1"),
        ("env: {id: x}\ntrainer: {steps: null}", "trainer.steps: must be a whole number"),
        ("env: {id: x}\ntrainer: 3", "trainer: must hold"),
        ("env: {id: x}\ntrainer: {learning_rate: .inf}", "trainer.learning_rate: must be a finite number"),
        ("env: {id: x}\nrollout: {temperature: 0}", "rollout.temperature: must be above 0, got 0"),
        ("env: {id: x}\nalgorithm: {advantage: {gamma: 1.1}}", "algorithm.advantage.gamma: must be at most 1, got 1.1"),
        (
            "env: {id: x}\nalgorithm: {loss: {kind: reinforce, clip_low: 0.1}}",
            "algorithm.loss.clip_low: no such key; there are: kind",
        ),
        (
            "env: {id: x}\nalgorithm: {preset: gpro}",
            "algorithm.preset: no algorithm is called 'gpro'; there are: grpo, dr_grpo, dapo, rloo, reinforce, ",
        ),
        ("env: {id: x}\nengine: {kind: 3}", "engine.kind: must be text, got 3"),
        ("env: {id: x}\nseed: -1", "seed: must be at least 0, got -1"),
        (f"env: {{id: x}}\nseed: {2**63}", f"seed: must be below {2**63}, got {2**63}"),
        ("env: {id: x, options: 3}", "env.options: must hold keys and values"),
        ("seed: 3", "env: is missing"),
        ("env: {}", "env.id: is missing"),
        ("env: []", "env: must have at least 1 entries"),
        ("env: [{id: x}, 3]", "env.1: must hold keys and values, got 3"),
        ("env: [{id: x}, {id: y, optoins: {}}]", "env.1.optoins: no such key; did you mean 'options'?"),
        ("env: {id: x, weight: -1}", "env.weight: must be above 0, got -1"),
    ],
)
def test_a_problem_begins_with_its_key(text: str, problem: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, text)
    assert found.startswith(problem)


# --- Parts of the algorithm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "advantage", "loss"),
    [
        ("{}", {"kind": "group_normalised", "gamma": 1.0, "baseline": "mean", "deviation": "group"}, CLIPPED),
        (
            "{preset: ppo}",
            {"kind": "gae", "unit": "turn", "gamma": 0.95, "gae_lambda": 0.95, "bootstrap": True},
            CLIPPED,
        ),
        ("{preset: reinforce}", {"kind": "batch_normalised", "gamma": 0.9}, {"kind": "reinforce"}),
        (
            "{preset: reinforce, advantage: {gamma: 0.5}, loss: }",
            {"kind": "batch_normalised", "gamma": 0.5},
            {"kind": "reinforce"},
        ),
        (
            "{preset: ppo, advantage: {kind: gae, gae_lambda: 0.5}, loss: {clip_low: 0.1}}",
            {"kind": "gae", "unit": "turn", "gamma": 0.95, "gae_lambda": 0.5, "bootstrap": True},
            {**CLIPPED, "clip_low": 0.1},
        ),
        (
            "{preset: ppo, advantage: batch_normalised, loss: {kind: imitation}}",
            {"kind": "batch_normalised", "gamma": 1.0},
            {"kind": "imitation"},
        ),
    ],
)
def test_a_part_is_that_of_the_preset_with_changes_or_another_kind_with_its_own_defaults(
    text: str, advantage: dict[str, Any], loss: dict[str, Any], tmp_path: Path
) -> None:
    run = load(tmp_path, f"{MINIMAL}algorithm: {text}\n")
    assert run.algorithm.advantage.model_dump() == advantage
    assert run.algorithm.loss.model_dump() == loss
    assert load(tmp_path, config.dump(run)) == run


def test_there_is_no_correction_unless_one_is_chosen(tmp_path: Path) -> None:
    for text in ("{}", "{correction: }", "{correction: null}"):
        assert load(tmp_path, f"{MINIMAL}algorithm: {text}").algorithm.correction is None
    for text, cap in (("tis", 2.0), ("{kind: tis, cap: 5}", 5.0)):
        correction = load(tmp_path, f"{MINIMAL}algorithm: {{correction: {text}}}").algorithm.correction
        assert correction is not None
        assert correction.model_dump() == {"kind": "tis", "cap": cap, "unit": "token", "mean": "product"}


def test_a_key_of_a_part_is_overridden_beside_the_name_of_its_preset(tmp_path: Path) -> None:
    run = load(
        tmp_path, MINIMAL + "algorithm: {preset: ppo}", "algorithm.advantage.gamma=0.5", "algorithm.loss.clip_low=0.1"
    )
    assert run.algorithm.advantage.model_dump()["gamma"] == 0.5
    assert run.algorithm.loss.model_dump()["clip_low"] == 0.1


def test_an_editor_requires_no_part_and_offers_the_keys_of_each() -> None:
    sections = RunConfig.model_json_schema()["$defs"]
    assert "required" not in sections["AlgorithmSection"]
    assert {"clip_low", "dual_clip"} < sections["Clipped"]["properties"].keys()


# --- Overrides -------------------------------------------------------------------------------------------------------


def test_overrides_are_read_as_yaml_and_the_last_one_wins(tmp_path: Path) -> None:
    run = load(
        tmp_path,
        MINIMAL,
        "trainer.steps=3",
        "trainer.steps=5",
        "env.options={slip: 0.25}",
        "env.options.size=3",
        "algorithm.preset=ppo",
        "tracking.to=[]",
        "engine.model=null",
        "sandbox.liveness.lost_s=2.5",
        "trainer.learning_rate=1e-5",
    )
    assert isinstance(run.trainer, TorchTrainerSection)
    assert (run.trainer.steps, run.trainer.learning_rate, run.algorithm.preset) == (5, 1e-5, "ppo")
    assert run.envs[0].options == {"slip": 0.25, "size": 3}
    assert (run.tracking.to, run.engine.model, run.sandbox.liveness.lost_s) == ([], None, 2.5)


def test_a_tracker_may_be_its_name_and_an_empty_key_means_the_default(tmp_path: Path) -> None:
    for text in ("[tensorboard]", "[{kind: tensorboard}]", ""):
        assert load(tmp_path, f"{MINIMAL}tracking: {{to: {text}}}").tracking.to == [TensorBoardSection()]


def test_an_override_may_hold_an_equals_sign_and_an_empty_value(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL, "env.options.word='a=b'").envs[0].options == {"word": "a=b"}
    assert load(tmp_path, MINIMAL, "env.options.word=").envs[0].options == {"word": None}


def test_an_override_can_name_the_environment_of_a_file_that_does_not(tmp_path: Path) -> None:
    assert load(tmp_path, "seed: 3", "env.id=Sokoban-v0").envs[0].id == "Sokoban-v0"


def test_a_list_of_environments_is_overridden_as_a_whole(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL, "env=[{id: Sokoban-v0}, {id: FrozenLake-v0, weight: 3}]")
    assert [section.id for section in run.envs] == ["Sokoban-v0", "FrozenLake-v0"]
    assert problems(tmp_path, "env: [{id: Sokoban-v0}]", "env.options.size=4") == [
        "env.options.size: env is a list; set the whole list, as in env=[...]"
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("=3", "=3: must have the form section.key=value"),
        ("seed.x=3", "seed.x: seed is a value and has no keys"),
        ("env.id.x.y=3", "env.id.x.y: id is a value and has no keys"),
        ("trainer.steps=[1", "trainer.steps: '[1' is not YAML: expected ',' or ']', but got '<stream end>'"),
        ("env=[]", "env: must have at least 1 entries"),
    ],
)
def test_an_override_that_is_none_is_named(override: str, problem: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, MINIMAL + "seed: 3\n", override)
    assert found.startswith(problem)


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_dict", "padding", "continue_final_message"])
def test_an_argument_of_the_template_that_envkit_sets_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, MINIMAL, "renderer.template.enable_thinking=false", f"renderer.template.{name}=1")
    assert found == f"renderer.template: {name} is reserved: envkit sets it; remove it"


@pytest.mark.parametrize("history", [0, -1, 1.5, True, "some", None])
def test_a_history_is_all_or_a_number_of_turns(history: object, tmp_path: Path) -> None:
    for right in ("all", 1, 7):
        assert load(tmp_path, MINIMAL, f"renderer.history={right}").renderer.history == right
    (found,) = problems(tmp_path, MINIMAL, f"renderer.history={'null' if history is None else history}")
    got = "" if history is None else f", got {history!r}"
    assert found == f"renderer.history: must be 'all' or a whole number of at least 1{got}"


def test_a_configuration_of_an_earlier_version_is_completed_with_the_defaults_of_new_keys() -> None:
    now = config.dump(config.parse({"env": {"id": "FrozenLake-v0"}}))
    assert "\n  player_timeout_s: null\n" in now
    earlier = now.replace("\n  player_timeout_s: null\n", "\n")
    assert config.complete(earlier) == now
    with pytest.raises(ConfigError, match=r"^rollout\.timeout_s: no such key"):
        config.complete("env: {id: FrozenLake-v0}\nrollout: {timeout_s: 9.0}\n")


EXAMPLES = Path(__file__).parents[2] / "examples"


FILES = sorted({*EXAMPLES.rglob("*.yaml")} - {*EXAMPLES.glob("cluster/*")})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_names_the_schema_of_its_kind_for_editors(path: Path) -> None:
    (schema,) = re.findall(r"^# yaml-language-server: \$schema=(.+)$", path.read_text(), re.M)
    config.load(path)  # they are all training files
    assert (path.parent / schema).resolve() == EXAMPLES.parent / "docs/config.schema.json"
