"""Tokens that are ignored: nothing is learned from them, and everything else stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envkit.types import Sample
from tests.trainer_bridge.trainees import ONE_UPDATE, Trainee, groups

SAMPLES = groups(1, count=2, members=4)


def ignoring(samples: Sequence[Sample], *, even: bool) -> list[Sample]:
    """Ignore the even, or else the odd, turns of every other episode, and all of the first one if `even`."""
    found = []
    for number, one in enumerate(samples):
        chosen = (one.turn_ids % 2 == 0) == even if number % 2 else np.full(len(one.mask), (number == 0) == even)
        found.append(replace(one, ignored=one.mask & chosen))
    return found


@pytest.mark.parametrize("preset", ["gigpo", "kl_cov", "decoupled_ppo"])
def test_what_is_learned_is_the_sum_of_what_two_halves_of_the_tokens_teach(preset: str, tiny_folder: Path) -> None:
    how: dict[str, Any] = (
        {"preset": "grpo", "loss": "kl_cov", "old_logprobs": "recomputed"} if preset == "kl_cov" else {"preset": preset}
    )

    def learned(samples: Sequence[Sample]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        trainee = Trainee(tiny_folder, None, **how, **ONE_UPDATE)
        report = trainee.update(samples)
        return {name: np.array(one) for name, one in trainee.gradients().items()}, report

    (whole, of_whole), (first, of_first), (second, of_second) = (
        learned(samples) for samples in (SAMPLES, ignoring(SAMPLES, even=True), ignoring(SAMPLES, even=False))
    )
    halves = [[one.turn_ids[one.mask & ~one.ignored] for one in ignoring(SAMPLES, even=even)] for even in (True, False)]
    tokens = [sum(map(len, half)) for half in halves]
    turns = [sum(len(np.unique(one)) for one in half) for half in halves]
    assert of_whole["samples"] == of_first["samples"] == of_second["samples"] == len(SAMPLES)
    for name, gradient in whole.items():
        one, other = turns if name.startswith("critic") else tokens  # each gradient is a mean over these
        total = (one * first[name] + other * second[name]) / (one + other)
        assert np.abs(total - gradient).max() <= 1e-5 * max(np.abs(gradient).max(), 1e-3), name


def test_an_update_whose_tokens_are_all_ignored_changes_nothing_but_the_version(tiny_folder: Path) -> None:
    trainee = Trainee(tiny_folder, None, preset="ppo")
    before = trainee.weights()
    report = trainee.update([replace(one, ignored=one.mask) for one in SAMPLES])
    assert trainee.weights() == before
    assert (trainee.trainer.version, report["policy_loss"], report["samples"]) == (1, 0.0, len(SAMPLES))


def test_a_minibatch_whose_tokens_are_all_ignored_is_not_trained(tiny_folder: Path) -> None:
    two = groups(1, count=2, members=4)
    half = [replace(one, ignored=one.mask) if one.group == two[0].group else one for one in two]
    whole, part = (Trainee(tiny_folder, None, preset="grpo", minibatches=2).update(samples) for samples in (two, half))
    assert (whole["updates"] + whole["skipped_updates"], part["updates"] + part["skipped_updates"]) == (2, 1)
    assert all(np.isfinite(value) for value in part.values())
    assert part["samples"] == len(two)


def test_the_gap_to_the_sampler_is_that_of_tokens_of_the_current_version(tiny_folder: Path) -> None:
    old = [replace(one, versions=np.where(one.mask, 5, -1)) for one in SAMPLES]
    assert "sampler_gap_nats" in Trainee(tiny_folder, None, preset="grpo").update(SAMPLES)
    assert "sampler_gap_nats" not in Trainee(tiny_folder, None, preset="grpo").update(old)
    # In the second update, the weights are no longer those of the current version.
    mixed = [two if one.group == "0" else one for one, two in zip(SAMPLES, old, strict=True)]
    gaps = [
        Trainee(tiny_folder, None, preset="grpo", seed=seed, learning_rate=0.1).update(mixed).get("sampler_gap_nats")
        for seed in range(6)
    ]
    assert None in gaps
    assert len({gap for gap in gaps if gap is not None}) == 1
