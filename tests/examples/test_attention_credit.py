"""The example package `attention_credit`: its numbers, its forward pass, and a run that uses its advantage."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from envkit import clock, config
from envkit.config import kinds
from envkit.runs.display import SilentDisplay
from envkit.runs.files import read_rows
from envkit.trainer_bridge.algorithms.algorithm import Chosen
from envkit.trainer_bridge.trainers.batching import TrainRows
from envkit.trainer_bridge.trainers.rollouts import rollouts_of
from envkit.types import Sample
from envkit.wiring.training.run import train
from tests.trainer_bridge.models import open_model, write_tiny
from tests.trainer_bridge.trainees import Trainee, algorithm_of, draw_samples

PACKAGE = Path(__file__).parents[2] / "examples/packages/attention_credit"


@pytest.fixture(autouse=True, scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package is installed for this process, by pip."""
    site = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(PACKAGE)]
    subprocess.run(command, check=True, timeout=120)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of six layers with two heads each."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "policy", seed=1, layers=6)


def section(**keys: Any) -> Any:
    return kinds.find("advantages", "attention_credit").section.model_validate(keys)


# --- Numbers of maps -------------------------------------------------------------------------------------------------

MAP = [
    [1.0, 0.0, 0.0, 0.0],
    [0.5, 0.5, 0.0, 0.0],
    [0.25, 0.25, 0.5, 0.0],
    [0.5, 0.125, 0.125, 0.25],
]


@pytest.mark.parametrize(
    ("own", "horizon", "distance", "waad", "fai"),
    [
        # Distances of the rows: 0.5 * 1 = 0.5, 0.25 * 2 + 0.25 * 1 = 0.75 and 0.5 * 3 + 0.125 * 2 + 0.125 * 1 = 1.875.
        # The window of 2 turns the last one into 0.5 * 2 + 0.125 * 2 + 0.125 * 1 = 1.375.
        # FAI[1] = (map[2, 1] + map[3, 1]) / 2 = (0.25 + 0.125) / 2, FAI[2] = map[3, 2]; nothing follows the last token.
        ([0, 1, 1, 1], (1, 2), 3.125 / 3, [0, 0.5, 0.75, 1.375], [0, 0.1875, 0.125, 0]),
        ([0, 1, 1, 1], (2, 2), 3.125 / 3, [0, 0.5, 0.75, 1.375], [0, 0.125, 0, 0]),
        # Token 2 is a tool's: neither its row nor its column counts, but it is at a distance.
        ([0, 1, 0, 1], (1, 2), 2.375 / 2, [0, 0.5, 0, 1.375], [0, 0.125, 0, 0]),
    ],
)
def test_the_numbers_of_a_map_are_those_worked_out_by_hand(
    own: list[int], horizon: tuple[int, int], distance: float, waad: list[float], fai: list[float]
) -> None:
    from attention_credit.maps import measure

    found = measure(torch.tensor([MAP]), torch.tensor(own).bool(), section(window=2, horizon=horizon))
    assert found.distance_H.tolist() == pytest.approx([distance])
    assert found.waad_HL.tolist() == [waad]
    assert found.fai_HL.tolist() == [fai]


def test_heads_with_small_distances_have_the_waad_and_those_with_large_ones_the_fai() -> None:
    from attention_credit.maps import Heads, profile

    heads = Heads(
        torch.tensor([3.0, 1.0, 2.0, 4.0]),
        torch.tensor([[10.0], [1.0], [3.0], [20.0]]),
        torch.tensor([[0.25], [9.0], [9.0], [0.75]]),
    )
    waad_L, fai_L = profile(heads, section())  # 30 % of 4 heads, rounded up: heads 1 and 2, and heads 0 and 3
    assert (waad_L.tolist(), fai_L.tolist()) == ([2.0], [0.5])


# The tokens 1 to 10 are the policy's. Changes of WAAD: 3, 4, 0, 3, 3.5, 0.5, 0, 2, 1 and 0 for the last token, so the
# preplan tokens (4 of 10) are 1, 2, 4 and 5. The anchors are 3, 6, 7 and 9. The (lower) median of WAAD is 1, so 9 is
# not locally dominated. The introduction of 3 is 2; that of 6 and of 7 is 5.
WAAD = [0, 2, 5, 1, 1, 4, 0.5, 1, 1, 3, 2]
FAI = [0, 0.1, 0.2, 0.9, 0, 0.3, 0.8, 0.7, 0.1, 0.6, 0]
OWN = [0, *[1] * 10]


@pytest.mark.parametrize(
    ("keys", "changes", "expected"),
    [
        ({"strategy": "local"}, {}, {1: 1.5, 2: 1.5, 4: 1.5, 5: 1.5}),
        # Without token 3, turns end after 2 and 10: the changes of 9 tokens are 3, 0, 3, 3.5, 0.5, 0, 2, 1 and 0.
        ({"strategy": "local"}, {"own": {3: 0}, "fai": {3: 0}, "waad": {3: 0}}, {1: 1.5, 4: 1.5, 5: 1.5, 8: 1.5}),
        ({"strategy": "global"}, {}, {3: 1.5, 6: 1.5, 7: 1.5, 9: 1.5}),
        ({"strategy": "global"}, {"fai": dict.fromkeys(range(11), 0)}, {}),  # an episode shorter than the horizon
        # Half of the bonus 0.5 of 3, 6 and 7 goes to 2 and 5; 5 has it once.
        ({}, {}, {2: 1.25, 3: 1.25, 5: 1.25, 6: 1.25, 7: 1.25, 9: 1.5}),
        ({"handover": 1.0}, {}, {2: 1.5, 5: 1.5, 9: 1.5}),
        # 5 is an anchor instead of 3: its own bonus is whole, since its WAAD is 4, and it has the half of 6 and 7.
        ({}, {"fai": {3: 0, 5: 0.9}}, {5: 1.75, 6: 1.25, 7: 1.25, 9: 1.5}),
    ],
)
def test_the_factors_are_those_worked_out_by_hand(
    keys: dict[str, Any], changes: dict[str, dict[int, float]], expected: dict[int, float]
) -> None:
    from attention_credit.maps import factors

    def changed(name: str, values: list[Any]) -> Tensor:
        return torch.tensor([float(changes.get(name, {}).get(place, value)) for place, value in enumerate(values)])

    found_L = factors(changed("waad", WAAD), changed("fai", FAI), changed("own", OWN).bool(), section(**keys))
    assert found_L.tolist() == [expected.get(place, 1.0) for place in range(11)]


# --- The forward pass ------------------------------------------------------------------------------------------------

KEYS: dict[str, Any] = {"window": 3, "horizon": [1, 6]}
"""For episodes of about twenty tokens."""


def samples_of(folder: Path) -> list[Sample]:
    return draw_samples(7, 8, folder)


def advantages(samples: list[Sample], model: Any, **keys: Any) -> list[list[float]]:
    rows = TrainRows(samples, range(len(samples)), [], [sample.logprobs[sample.mask] for sample in samples], [], [], [])
    given = rollouts_of(rows, algorithm_of(), [], [], [], kl_coefficient=0.0)
    own = section(**KEYS, **keys)
    chosen = Chosen(kinds.find("advantages", own.kind), own)
    return [part.tolist() for part in rows.split(chosen(replace(given, model=model)).advantage_N)]


def test_nonnegative_advantages_are_scaled_by_the_factors_of_the_maps_that_the_model_returns(folder: Path) -> None:
    from attention_credit.maps import Heads, factors, measure, profile

    samples, model, eager = samples_of(folder), open_model(folder), open_model(folder, attention="eager")
    plain, found = (advantages(samples, model, amplification=amplification) for amplification in (1.0, 1.5))
    both = advantages(samples, model, scales_negative=True)
    for sample, before, after, either in zip(samples, plain, found, both, strict=True):
        ids_BL, own_L = torch.tensor(sample.token_ids[None].astype(int)), torch.tensor(sample.mask)
        maps = eager(input_ids=ids_BL, output_attentions=True).attentions
        heads = [measure(maps[layer][0].detach(), own_L, section(**KEYS)) for layer in (2, 3, 4)]  # of six
        joined = Heads(*map(torch.cat, zip(*heads, strict=True)))
        factor_N = factors(*profile(joined, section(**KEYS)), own_L, section(**KEYS))[own_L]
        scaled = (factor_N * torch.tensor(before)).tolist()
        assert either == pytest.approx(scaled)
        assert after == pytest.approx(scaled if before[0] > 0 else before)
    assert found != plain
    assert both != found


def test_the_log_probabilities_of_the_trainer_are_the_same_bits_afterwards(folder: Path) -> None:
    samples = samples_of(folder)
    trainee = Trainee(folder, None)
    before = trainee.score(samples)
    advantages(samples, trainee.model)
    with pytest.raises(IndexError):  # a token that the policy does not have
        advantages([replace(one, token_ids=one.token_ids + 1000) for one in samples], trainee.model)
    assert trainee.score(samples) == before
    assert trainee.model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in trainee.model.modules())


# --- A run -----------------------------------------------------------------------------------------------------------


def test_a_tiny_policy_trains_with_the_advantage(tmp_path: Path) -> None:
    content = {
        "seed": 3,
        "env": {"id": "FrozenLake-v0", "num_envs": 8, "options": {"size": 2, "frozen": 1.0}},
        "sandbox": {"kind": "none"},
        "engine": {"hidden_size": 16, "layers": 1, "device": "cpu"},
        "rollout": {"group_size": 4, "max_turns": 6},
        "algorithm": {"advantage": {"kind": "attention_credit", "horizon": [10, 100]}},
        "trainer": {"steps": 2, "groups_per_step": 2},
        "threads": 1,
        "evaluation": {"episodes": 0},
        "tracking": {"to": [], "trajectories_every": 0},
        "imitation": {"states": 20, "updates": 1, "check_episodes": 0},
    }
    loaded = config.parse(content)
    assert config.parse(yaml.safe_load(config.dump(loaded))) == loaded
    clock.run(partial(train, loaded, tmp_path / "run", resume=False, force=False, display=SilentDisplay()))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    found = [(row["step"], row["policy_version"], row["advantage_abs"] != 0, row["grad_norm"] != 0) for row in rows]
    assert found == [(1, 0, True, True), (2, 1, True, True)]
