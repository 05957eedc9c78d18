"""The trainer in one process: its gradient is the sum of the slow ones, however an update is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envkit.errors import UsageError
from envkit.trainer_bridge.diagnostics import checks
from envkit.trainer_bridge.trainers.batching import minibatches, passes
from envkit.trainer_bridge.trainers.learner import VALUE_WEIGHT
from envkit.types import Sample, floats
from tests.golden import slow
from tests.trainer_bridge.models import sample
from tests.trainer_bridge.trainees import (
    KINDS,
    ONE_UPDATE,
    Trainee,
    completion_logps,
    draw_samples,
    groups,
    with_logprobs,
)
from tests.trainer_bridge.trainers.own_parts import TWO_CRITICS
from tests.trainer_bridge.trainers.slow_updates import slow_gradient, slow_values


def updated(folder: Path, weights: Path, samples: Sequence[Sample], **how: Any) -> tuple[Trainee, dict[str, float]]:
    trainee = Trainee(folder, weights, **how)
    return trainee, trainee.update(samples)


# --- The gradient ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "is_shared"), [*((kind, True) for kind in KINDS), ("grpo with kl", False)])
def test_the_gradient_and_the_report_are_those_of_the_slow_loss(
    kind: str, is_shared: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    samples = groups(1) if is_shared else draw_samples(0, 8, tiny_folder)  # with or without common prompts
    how = {**KINDS[kind], **ONE_UPDATE}
    expected, parts = slow_gradient(Trainee(tiny_folder, None, **how), samples)
    for micro_tokens, packing in ((10**6, False), (90, True)):  # test_invariance.py has the others
        trainee, report = updated(tiny_folder, tmp_path, samples, **how, packing=packing, micro_tokens=micro_tokens)
        assert trainee.scorer.shares_rows
        got = trainee.gradients()
        for name, values in expected.items():
            size = max(map(abs, values))
            assert got[name] == pytest.approx(values, rel=1e-4, abs=1e-4 * max(size, 1e-3)), name
        for name, value in parts.items():
            assert report[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_the_critic_learns_returns_of_the_estimates_and_reports_half_the_squared_error(
    tiny_folder: Path, tmp_path: Path
) -> None:
    samples = draw_samples(0, 8, tiny_folder)
    trainee, report = updated(tiny_folder, tmp_path, samples, **{**KINDS["ppo"], **ONE_UPDATE})
    errors = []
    for one in samples:
        # The target is advantage plus value, so the error is the advantage.
        errors += slow.gae(one.rewards.tolist(), slow_values(trainee.critics[0], one), 0.95, 0.95)
    assert report["value_loss"] == pytest.approx(math.fsum(0.5 * error**2 for error in errors) / len(errors), rel=1e-4)
    # The head's bias is added to every estimate: its slope is the mean error, times the weight of the critic's loss.
    slope = -VALUE_WEIGHT * math.fsum(errors) / len(errors)
    assert trainee.gradients()["critic.head.bias"] == [pytest.approx(slope, abs=1e-5)]


def test_two_critics_learn_each_its_own_target(tiny_folder: Path, tmp_path: Path) -> None:
    samples = draw_samples(0, 8, tiny_folder)
    how = {"learning_rate": 1e-30, "critic_learning_rate": 1e-30, "micro_tokens": 30}
    trainee, report = updated(tiny_folder, tmp_path, samples, algorithm=TWO_CRITICS, **how)
    rewards = [reward for one in samples for reward in one.rewards.tolist()]
    first, second = ([value for one in samples for value in slow_values(critic, one)] for critic in trainee.critics)
    worth = [reward - (one + other) / 2 for reward, one, other in zip(rewards, first, second, strict=True)]
    tokens = [int((one.turn_ids[one.mask] == turn).sum()) for one in samples for turn in range(len(one.rewards))]
    expected = math.fsum(abs(one) * count for one, count in zip(worth, tokens, strict=True)) / sum(tokens)
    assert report["advantage_abs"] == pytest.approx(expected, rel=1e-4)
    squares = []
    for factor, critic, values in zip((1, 2), trainee.critics, (first, second), strict=True):
        errors = [factor * reward - value for reward, value in zip(rewards, values, strict=True)]
        squares += [0.5 * error**2 for error in errors]
        assert critic.head.bias.grad is not None
        assert critic.head.bias.grad.tolist() == [
            pytest.approx(-VALUE_WEIGHT * math.fsum(errors) / len(errors), abs=1e-5)
        ]
    assert report["value_loss"] == pytest.approx(math.fsum(squares) / len(squares), rel=1e-4)


def test_imitation_is_the_mean_cross_entropy_of_the_tokens_whatever_their_rewards(
    tiny_folder: Path, tmp_path: Path
) -> None:
    samples = draw_samples(0, 8, tiny_folder)
    trainee = Trainee(tiny_folder, tmp_path, **KINDS["ppo"], temperature=0.5, micro_tokens=30)
    logps = [logp for one in samples for logp in completion_logps(trainee.model, one)]  # at temperature 1
    (report,) = trainee.imitate([samples])
    assert report["policy_loss"] == pytest.approx(-math.fsum(logps) / len(logps), abs=1e-5)
    assert (trainee.critics, trainee.reference, report["samples"]) == ([], None, 8.0)


def test_imitated_tokens_become_likelier_along_a_cosine_of_rates(tiny_folder: Path, tmp_path: Path) -> None:
    trainee = Trainee(tiny_folder, tmp_path, imitation_rate=0.05, imitates_with_muon=True)
    reports = trainee.imitate([draw_samples(0, 8, tiny_folder)] * 8)
    assert reports[-1]["policy_loss"] < 0.5 * reports[0]["policy_loss"]
    rates = [0.025 * (1 + math.cos(math.pi * update / 8)) for update in range(8)]
    assert [report["learning_rate"] for report in reports] == pytest.approx(rates)


def test_without_muon_imitation_moves_every_weight_by_the_rate_of_adamw(chat_folder: Path) -> None:
    trainee = Trainee(chat_folder, None, imitation_rate=1e-3, weight_decay=0.5)  # of reinforcement alone
    before = trainee.weights()
    trainee.imitate([groups(0)])
    gradients = trainee.gradients()
    for name, values in trainee.weights().items():
        pairs = zip(values, before[name], gradients[name], strict=True)
        moved = [abs(after - first) for after, first, gradient in pairs if abs(gradient) > 1e-4]
        assert moved
        assert moved == pytest.approx([1e-3] * len(moved), rel=0.01), name


def test_imitation_starts_reinforcement_from_its_weights_with_critic_and_reference(tiny_folder: Path) -> None:
    trainee = Trainee(tiny_folder, None, preset="ppo", kl={"coefficient": 0.1}, imitation_rate=0.01)
    samples = draw_samples(0, 8, tiny_folder)
    trainee.imitate([samples] * 2)
    assert (trainee.trainer.version, len(trainee.critics)) == (2, 0)
    anyio.run(trainee.trainer.begin, "reinforcement", 5)
    assert (trainee.trainer.version, len(trainee.critics)) == (0, 1)
    imitated = trainee.score(samples)
    trainee.update(samples)
    found = trainee.trainer._learner.score(samples, of_reference=True)[0]
    assert [logps.tolist() for logps in found] == imitated != trainee.score(samples)


def test_passes_hold_every_row_once_and_never_more_tokens_than_allowed() -> None:
    lengths = [3, 9, 4, 4, 20, 5, 3]
    samples = [sample([1] * (length - 1), ([5], ())) for length in lengths]
    # By length: 3, 3, 4 | 4, 5 | 9 | 20, where 3 * 4 = 12, 2 * 5 = 10, and 20 is alone although it is too long.
    assert passes(samples, 12) == [[0, 6, 2], [3, 5], [1], [4]]
    assert passes(samples, 1) == [[0], [6], [2], [3], [5], [1], [4]]
    assert passes(samples, 7 * 20) == [[0, 6, 2, 3, 5, 1, 4]]
    assert passes([], 12) == []


def test_a_large_gradient_is_cut_to_the_bound_and_reported_as_it_was(tiny_folder: Path, tmp_path: Path) -> None:
    samples = draw_samples(2, 8, tiny_folder)
    free, report = updated(tiny_folder, tmp_path, samples, preset="grpo", minibatches=1)
    cut, same = updated(tiny_folder, tmp_path, samples, preset="grpo", minibatches=1, max_grad_norm=0.01)
    assert same["grad_norm"] == report["grad_norm"] > 0.1
    for name, values in free.gradients().items():
        scaled = [value * 0.01 / report["grad_norm"] for value in values]
        assert cut.gradients()[name] == pytest.approx(scaled, rel=1e-3, abs=1e-8)


@pytest.mark.parametrize(("kind", "key"), [("grpo", "learning_rate"), ("ppo", "critic_learning_rate")])
def test_gradients_that_are_no_numbers_move_nothing_and_end_the_run_after_three_in_a_row(
    kind: str, key: str, tiny_folder: Path, tmp_path: Path
) -> None:
    trainee = Trainee(tiny_folder, tmp_path, preset=kind, minibatches=3)
    trainee.update(draw_samples(2, 12, tiny_folder))
    before = trainee.weights()
    spoiled: Any = trainee.critics[0].head if trainee.critics else trainee.model
    next(spoiled.parameters()).register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(UsageError) as caught:
        trainee.update(draw_samples(2, 12, tiny_folder))
    assert str(caught.value) == (
        "the gradient of train step 2 is not finite; "
        f"lower trainer.{key} and continue from the last checkpoint with --resume"
    )
    assert trainee.weights() == before


def test_an_update_with_nothing_to_learn_leaves_policy_and_optimiser_as_they_are(
    tiny_folder: Path, tmp_path: Path
) -> None:
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo", weight_decay=0.1)
    trainee.update(draw_samples(2, 8, tiny_folder))
    before, state, published = trainee.weights(), optimiser_state(trainee), trainee.publish()
    same = [replace(one, rewards=floats([0.0] * len(one.rewards))) for one in draw_samples(3, 8, tiny_folder)]
    report = trainee.update(same)
    assert (report["updates"], report["skipped_updates"], report["grad_norm"]) == (0.0, 2.0, 0.0)
    assert (trainee.weights(), optimiser_state(trainee)) == (before, state)
    after = trainee.publish()
    assert (after.version, after.checksum) == (2, published.checksum)
    assert not checks.of_metrics(report, [report], tolerance_nats=1.0)


def test_an_update_whose_tokens_are_all_clipped_leaves_the_policy_as_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo", epochs=1, minibatches=1)
    trainee.update(draw_samples(2, 8, tiny_folder))
    before = trainee.weights()
    # The better sample became e**5 times as likely, and the worse one as unlikely: neither has a gradient.
    pair = [sample([1, 5, 4], ([6], ()), rewards=[reward]) for reward in (0.0, 1.0)]
    logps = zip(trainee.score(pair), (5.0, -5.0), strict=True)
    shifted = [[value + shift for value in one if value != 0] for one, shift in logps]
    report = trainee.update([with_logprobs(one, some) for one, some in zip(pair, shifted, strict=True)])
    assert (report["updates"], report["skipped_updates"], report["clip_share"]) == (0.0, 1.0, 1.0)
    assert trainee.weights() == before


def optimiser_state(trainee: Trainee) -> list[list[float]]:
    state = trainee.trainer._learner.state()["policy_optimizer"].state_dict()["state"]
    return [tensor.flatten().tolist() for one in state.values() for tensor in one.values()]


def test_the_critic_learns_from_an_update_in_which_the_policy_has_nothing_to_learn(
    tiny_folder: Path, tmp_path: Path
) -> None:
    trainee = Trainee(tiny_folder, tmp_path, preset="ppo", epochs=1, minibatches=1)
    trainee.update(draw_samples(2, 8, tiny_folder))
    before = trainee.weights()
    report = trainee.update([sample([1, 5, 4], ([6], ()), rewards=[1.0])])  # a single advantage is normalised to 0
    moved = {name.partition(".")[0] for name, values in trainee.weights().items() if values != before[name]}
    assert (report["skipped_updates"], moved) == (1.0, {"critic"})


def test_advantages_are_clipped_where_asked(tiny_folder: Path, tmp_path: Path) -> None:
    samples = [sample([1, 5 + place], ([6], ()), rewards=[reward]) for place, reward in enumerate([9.0, 0.0, 0.0, 0.0])]
    # Mean 2.25, deviation 4.5: advantages 1.5, -0.5, -0.5, -0.5.
    _, free = updated(tiny_folder, tmp_path, samples, preset="grpo", minibatches=1)
    _, cut = updated(tiny_folder, tmp_path, samples, preset="grpo", minibatches=1, advantage_clip=0.7)
    assert free["advantage_abs"] == pytest.approx(0.75, abs=1e-5)
    assert cut["advantage_abs"] == pytest.approx((0.7 + 3 * 0.5) / 4, abs=1e-5)


# --- Minibatches -----------------------------------------------------------------------------------------------------


@given(
    drawn=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 300)), min_size=1, max_size=40),
    parts=st.integers(1, 9),
    seed=st.integers(0, 2**64),
)
def test_updates_are_balanced_by_tokens_with_whole_groups_once_an_epoch(
    drawn: list[tuple[str, int]], parts: int, seed: int
) -> None:
    names, tokens = zip(*drawn, strict=True)
    of_group = [sum(size for name, size in drawn if name == one) for one in {*names}]
    count = min(parts, len(of_group))
    found = list(minibatches(names, tokens, parts, 3, seed=seed))
    assert len(found) == 3 * count
    for first in range(0, 3 * count, count):
        epoch = found[first : first + count]
        assert sorted(row for part in epoch for row in part) == list(range(len(drawn)))
        assert sum(len({names[row] for row in part}) for part in epoch) == len(of_group)
        sizes = [sum(tokens[row] for row in part) for part in epoch]
        assert max(sizes) - min(sizes) <= max(of_group)


def test_every_epoch_has_another_order() -> None:
    names = [f"task-{number}" for number in range(40)]
    updates = [str(part) for seed in (1, 2) for part in minibatches(names, [5] * 40, 4, 3, seed=seed)]
    assert len({*updates}) == 2 * 3 * 4


def test_an_update_reads_each_of_its_groups_once(tiny_folder: Path) -> None:
    samples = groups(2, count=4)
    trainee = Trainee(tiny_folder, None, preset="grpo", minibatches=2)
    fed: list[int] = []
    trainee.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    trainee.update(samples)
    assert fed == [2, 2]  # two groups a minibatch, each one row


def test_samples_may_come_in_pieces_and_count_once(tiny_folder: Path, tmp_path: Path) -> None:
    samples = draw_samples(4, 8, tiny_folder)
    whole, report = updated(tiny_folder, tmp_path, samples, preset="grpo")
    pieces = Trainee(tiny_folder, tmp_path, preset="grpo")
    for one in samples[:-1]:
        anyio.run(pieces.trainer.accumulate, [one])
    assert pieces.update(samples[-1:]) == report
    assert pieces.weights() == whole.weights()
    with pytest.raises(ValueError, match="update\\(\\) without samples"):
        pieces.update([])


# --- Learning --------------------------------------------------------------------------------------------------------


def test_samples_of_another_temperature_are_learned_from_at_that_temperature(tiny_folder: Path, tmp_path: Path) -> None:
    temperature = 0.5
    bare = [sample([1, 5, place], ([6, 7], ()), rewards=[float(place % 2)]) for place in range(3, 9)]
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo", minibatches=1, temperature=temperature)
    report = trainee.update(
        [with_logprobs(one, completion_logps(trainee.model, one, temperature=temperature)) for one in bare]
    )
    assert report["approx_kl"] == pytest.approx(0.0, abs=1e-7)
    assert report["clip_share"] == 0.0
    slope = {name: values for name, values in trainee.gradients().items() if name.startswith("policy.model.layers.0")}
    assert any(abs(value) > 1e-4 for values in slope.values() for value in values)


# --- Old log-probabilities -------------------------------------------------------------------------------------------


def test_scores_are_the_slow_log_probabilities_of_the_tokens_of_the_policy(tiny_folder: Path, tmp_path: Path) -> None:
    samples = draw_samples(5, 8, tiny_folder)
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo", micro_tokens=40)
    for one, scores in zip(samples, trainee.score(samples), strict=True):
        assert scores == pytest.approx(completion_logps(trainee.model, one), abs=1e-5)


def test_recomputed_old_log_probabilities_are_those_that_the_trainer_scores(tiny_folder: Path, tmp_path: Path) -> None:
    samples = draw_samples(5, 8, tiny_folder)  # with log-probabilities that are wrong by up to 0.5 nats
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo", epochs=2, old_logprobs="recomputed")
    scores = trainee.score(samples)
    report = trainee.update(samples)

    sampled = Trainee(tiny_folder, tmp_path, preset="grpo", epochs=2)
    scored = [with_logprobs(one, logps) for one, logps in zip(samples, scores, strict=True)]
    expected = sampled.update(scored)
    assert sampled.weights() == trainee.weights()
    assert report == {**expected, "sampler_gap_nats": report["sampler_gap_nats"]}


@pytest.mark.parametrize(("old_logprobs", "minibatches"), [("sampled", 4), ("recomputed", 1)])
def test_the_gap_to_the_sampler_is_measured_before_the_weights_change(
    old_logprobs: str, minibatches: int, tiny_folder: Path, tmp_path: Path
) -> None:
    samples = draw_samples(5, 8, tiny_folder)
    how: dict[str, Any] = {"preset": "grpo", "epochs": 1, "minibatches": minibatches, "learning_rate": 0.5}
    trainee = Trainee(tiny_folder, tmp_path, old_logprobs=old_logprobs, **how)
    exact = [with_logprobs(one, logps) for one, logps in zip(samples, trainee.score(samples), strict=True)]
    shifted = [with_logprobs(one, one.logprobs[one.mask] - 0.25) for one in exact]
    assert trainee.update(shifted)["sampler_gap_nats"] == pytest.approx(0.25, abs=1e-5)
