"""Algorithms by name, as data."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from envkit.trainer_bridge.algorithms.catalogue import PRESETS, Algorithm, Part
from pydantic import BaseModel, ConfigDict

from envkit.errors import ConfigError
from envkit.trainer_bridge.algorithms import catalogue


def test_a_preset_without_changes_is_the_preset() -> None:
    for name, algorithm in PRESETS.items():
        assert catalogue.resolve(name, {}) == algorithm
        assert catalogue.resolve(name, {"clip": None, "epochs": None}) == algorithm


def test_changes_replace_what_they_name_and_nothing_else() -> None:
    assert catalogue.resolve("ppo", {"clip": 0.1, "kl_coefficient": 0.0}) == replace(PRESETS["ppo"], clip=0.1)


def test_only_an_advantage_that_needs_values_has_a_critic() -> None:
    assert {name: algorithm.has_critic for name, algorithm in PRESETS.items()} == {
        "grpo": False,
        "reinforce": False,
        "ppo": True,
    }
    assert catalogue.resolve("grpo", {"advantage": "gae"}).has_critic


@pytest.mark.parametrize(
    ("preset", "changes", "problems"),
    [
        ("gpro", {}, ["algorithm.preset: no algorithm is called 'gpro'; there are: grpo, reinforce, ppo"]),
        ("PPO", {}, ["algorithm.preset: no algorithm is called 'PPO'; there are: grpo, reinforce, ppo"]),
        ("dqn", {}, ["algorithm.preset: no algorithm is called 'dqn'; there are: grpo, reinforce, ppo"]),
        (
            "grpo",
            {"advantage": "group_normalized"},
            ["algorithm.advantage: no advantage is called 'group_normalized'; did you mean 'group_normalised'?"],
        ),
        ("grpo", {"loss": "cliped"}, ["algorithm.loss: no loss is called 'cliped'; did you mean 'clipped'?"]),
        (
            "grpo",
            {"loss": "x", "advantage": "y"},
            [
                "algorithm.advantage: no advantage is called 'y'; there are: batch_normalised, gae, group_normalised",
                "algorithm.loss: no loss is called 'x'; there are: clipped, reinforce",
            ],
        ),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(
    preset: str, changes: dict[str, str], problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        catalogue.resolve(preset, changes)
    assert list(caught.value.problems) == problems


# --- Parts -----------------------------------------------------------------------------------------------------------


def test_every_part_is_a_function_with_a_name_of_its_own() -> None:
    assert len({part.name for part in catalogue.PARTS}) == len(catalogue.PARTS)
    for part in catalogue.PARTS:
        assert callable(part.load()), part.name
        assert part.keys <= {field.name for field in fields(Algorithm)}


def test_a_name_belongs_to_its_family() -> None:
    with pytest.raises(ConfigError) as caught:
        catalogue.resolve("grpo", {"advantage": "clipped", "loss": "gae"})
    assert [problem.partition(" is called ")[0] for problem in caught.value.problems] == [
        "algorithm.advantage: no advantage",
        "algorithm.loss: no loss",
    ]


@pytest.mark.parametrize(
    ("preset", "changes", "keys"),
    [
        ("grpo", {"gae_lambda": 0.9}, ["gae_lambda"]),
        ("reinforce", {"clip": 0.1}, ["clip"]),
        ("reinforce", {"old_logprobs": "sampled"}, ["old_logprobs"]),
        ("reinforce", {"dual_clip": 3.0}, ["dual_clip"]),
        ("ppo", {"loss": "reinforce", "clip": 0.1}, ["clip"]),
        ("grpo", {"clip": 0.1, "old_logprobs": "recomputed"}, []),
        ("ppo", {"gae_lambda": 0.9, "clip": 0.1}, []),
        ("reinforce", {"gamma": 0.5, "entropy_coefficient": 0.1, "kl_coefficient": 0.1, "advantage_clip": 5.0}, []),
    ],
)
def test_a_key_that_the_advantage_and_the_loss_do_not_use_is_refused(
    preset: str, changes: dict[str, Any], keys: list[str]
) -> None:
    found: list[str] = []
    try:
        catalogue.resolve(preset, changes)
    except ConfigError as error:
        found = list(error.problems)
    assert [problem.partition(":")[0] for problem in found] == [f"algorithm.{key}" for key in keys]
    assert all(problem.endswith(" do not use it; remove it") for problem in found)


class Squash(BaseModel):
    """Parameters of a loss of another package."""

    model_config = ConfigDict(extra="forbid")
    width: float = 0.5


def squashed(tokens: object, algorithm: Algorithm) -> float:
    width: float = algorithm.parameters["squashed"].width
    return width


PARTS = {part.name: part for part in (*catalogue.PARTS, Part("squashed", "loss", squashed, section=Squash))}


def test_a_part_of_another_package_is_chosen_by_name_and_has_its_own_parameters() -> None:
    algorithm = catalogue.resolve("grpo", {"loss": "squashed", "parameters": {"width": 0.25}}, PARTS)
    assert algorithm.loss.load()(None, algorithm) == 0.25
    standard = catalogue.resolve("grpo", {"loss": "squashed"}, PARTS)
    assert standard.loss.load()(None, standard) == 0.5


@pytest.mark.parametrize(
    ("loss", "parameters", "problem"),
    [
        ("squashed", {"widht": 1.0}, "algorithm.parameters.widht: no such key; did you mean 'width'?"),
        ("squashed", {"width": "wide"}, "algorithm.parameters.width: Input should be a valid number, "),
        ("clipped", {"width": 1.0}, "algorithm.parameters.width: no such key"),
    ],
)
def test_parameters_that_the_parts_do_not_have_are_refused(loss: str, parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        catalogue.resolve("grpo", {"loss": loss, "parameters": parameters}, PARTS)
    assert caught.value.problems[0].startswith(problem)
    assert "\n" not in caught.value.problems[0]


# --- Combinations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "changes", "group_size", "problems"),
    [
        ("grpo", {}, 2, []),
        ("ppo", {}, 1, []),
        ("reinforce", {}, 1, []),
        ("ppo", {"epochs": 4, "minibatches": 4}, 1, []),
        (
            "grpo",
            {},
            1,
            ["rollout.group_size: group_normalised compares the episodes of a group, so it must be at least 2, got 1"],
        ),
        (
            "reinforce",
            {"epochs": 2, "minibatches": 3},
            1,
            [
                f"algorithm.{key}: the reinforce loss is only valid for samples of the current policy; use 1, or the "
                f"clipped loss, got {count}"
                for key, count in (("epochs", 2), ("minibatches", 3))
            ],
        ),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_the_reason(
    preset: str, changes: dict[str, Any], group_size: int, problems: list[str]
) -> None:
    assert catalogue.problems(catalogue.resolve(preset, changes), group_size=group_size) == problems


def test_the_catalogue_is_read_without_torch() -> None:
    script = "import sys, envkit.trainer_bridge.algorithms.catalogue; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
