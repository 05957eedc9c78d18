"""Algorithms by name, as data."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from envkit.errors import ConfigError
from envkit.trainer_bridge.algorithms import catalogue
from envkit.trainer_bridge.algorithms.catalogue import PRESETS


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
        ("gpro", {}, ["algorithm.preset: no algorithm is called 'gpro'; did you mean 'grpo'?"]),
        ("PPO", {}, ["algorithm.preset: no algorithm is called 'PPO'; did you mean 'ppo'?"]),
        ("dqn", {}, ["algorithm.preset: no algorithm is called 'dqn'; there are: grpo, ppo, reinforce"]),
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


def test_the_catalogue_is_read_without_torch() -> None:
    script = "import sys, envkit.trainer_bridge.algorithms.catalogue; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
