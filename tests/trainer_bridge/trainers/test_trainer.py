"""The trainer in one process: its gradient is the sum of the slow ones, however an update is cut."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from envkit.errors import UsageError
from envkit.trainer_bridge.algorithms import catalogue
from envkit.trainer_bridge.diagnostics import checks
from envkit.trainer_bridge.trainers.batching import passes
from envkit.trainer_bridge.trainers.torch_local import VALUE_WEIGHT, TorchTrainer, TrainerSettings
from envkit.types import Sample, floats
from tests.golden import slow
from tests.trainer_bridge.models import sample
from tests.trainer_bridge.trainees import KINDS, Trainee, completion_logps, draw_samples, with_logprobs

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def updated(folder: Path, weights: Path, samples: Sequence[Sample], **how: Any) -> tuple[Trainee, dict[str, float]]:
    trainee = Trainee(folder, weights, **how)
    return trainee, trainee.update(samples)


# --- The gradient ----------------------------------------------------------------------------------------------------


def slow_advantages(trainee: Trainee, samples: Sequence[Sample]) -> list[list[float]]:
    """Advantages of every turn of every sample, in plain Python."""
    algorithm = trainee.algorithm
    rewards = [one.rewards.tolist() for one in samples]
    if algorithm.advantage.name == "group_normalised":
        return slow.group_normalised(rewards, [one.group for one in samples], algorithm.gamma)
    if algorithm.advantage.name == "batch_normalised":
        return slow.normalised([slow.returns(one, algorithm.gamma) for one in rewards])
    values = [slow_values(trainee, one) for one in samples]
    estimates = [slow.gae(*pair, algorithm.gamma, algorithm.gae_lambda) for pair in zip(rewards, values, strict=True)]
    return slow.normalised(estimates)


def slow_values(trainee: Trainee, one: Sample) -> list[float]:
    """The critic's estimates, of prefixes that end where each turn's completion begins."""
    assert trainee.critic is not None
    critic, values = trainee.critic, []
    for turn in range(len(one.rewards)):
        begin = next(
            place for place, (own, of) in enumerate(zip(one.mask, one.turn_ids, strict=True)) if own and of == turn
        )
        with torch.no_grad():
            hidden_BLH = critic.body(input_ids=torch.tensor([one.token_ids[:begin].tolist()])).last_hidden_state
            values.append(critic.head(hidden_BLH[0, -1]).item())
    return values


def slow_loss(trainee: Trainee, samples: Sequence[Sample]) -> tuple[Any, dict[str, float]]:
    """The loss of an update over all samples, one token of one row after another, and its parts."""
    algorithm = trainee.algorithm
    parts: defaultdict[str, float] = defaultdict(float)
    whole: Any = 0.0
    tokens = sum(one.num_policy_tokens for one in samples)
    for one, worth in zip(samples, slow_advantages(trainee, samples), strict=True):
        logits_LV = trainee.model(input_ids=torch.tensor([one.token_ids.tolist()]), use_cache=False).logits[0].double()
        references = iter(completion_logps(trainee.reference, one) if trainee.reference is not None else ())
        for place in [place for place, own in enumerate(one.mask) if own]:
            chance_V = torch.softmax(logits_LV[place - 1], dim=-1)
            logp, old = chance_V[one.token_ids[place]].log(), float(one.logprobs[place])
            advantage = worth[one.turn_ids[place]]
            ratio = (logp - old).exp()
            moved = ratio.item()
            if algorithm.loss.name == "reinforce":
                loss: Any = -advantage * logp
            else:
                edge = 1 + algorithm.clip * (1 if advantage > 0 else -1)
                held = moved > edge if advantage > 0 else moved < edge
                loss = -advantage * (logp * 0 + edge if held else ratio)
                parts["clip_share"] += float(held and advantage != 0)
            entropy = -(chance_V * chance_V.log()).sum()
            parts["policy_loss"] += loss.item()
            parts["entropy_nats"] += entropy.item()
            parts["advantage_abs"] += abs(advantage)
            parts["approx_kl"] += moved - 1 - math.log(moved)
            loss = loss - algorithm.entropy_coefficient * entropy
            if trainee.reference is not None:
                difference = next(references) - logp
                kl = difference.exp() - 1 - difference
                parts["reference_kl"] += kl.item()
                loss = loss + algorithm.kl_coefficient * kl
            whole = whole + loss / tokens
    return whole, {name: value / tokens for name, value in parts.items()}


@EVERY_KIND
def test_the_gradient_and_the_report_are_those_of_the_slow_loss(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    samples = draw_samples(0, 8, tiny_folder)
    how = {**KINDS[kind], "epochs": 1, "minibatches": 1, "learning_rate": 1e-30, "critic_learning_rate": 1e-30}
    trainee, report = updated(tiny_folder, tmp_path, samples, **how)
    got = trainee.gradients()

    trainee.model.zero_grad()
    loss, parts = slow_loss(trainee, samples)
    loss.backward()
    for name, weight in trainee.model.named_parameters():
        assert got[f"policy.{name}"] == pytest.approx(weight.grad.flatten().tolist(), rel=1e-4, abs=1e-5)
    for name, value in parts.items():
        assert report[name] == pytest.approx(value, abs=1e-5)
    squares = math.fsum(value**2 for name, values in got.items() if name.startswith("policy") for value in values)
    assert report["grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-4)


def test_the_critic_learns_returns_of_the_estimates_and_reports_half_the_squared_error(
    tiny_folder: Path, tmp_path: Path
) -> None:
    samples = draw_samples(0, 8, tiny_folder)
    how = {**KINDS["ppo"], "epochs": 1, "minibatches": 1, "critic_learning_rate": 1e-30}
    trainee, report = updated(tiny_folder, tmp_path, samples, **how)
    algorithm = trainee.algorithm
    errors = []
    for one in samples:
        values = slow_values(trainee, one)
        # The target is advantage plus value, so the error is the advantage.
        errors += slow.gae(one.rewards.tolist(), values, algorithm.gamma, algorithm.gae_lambda)
    assert report["value_loss"] == pytest.approx(math.fsum(0.5 * error**2 for error in errors) / len(errors), rel=1e-4)
    # The head's bias is added to every estimate: its slope is the mean error, times the weight of the critic's loss.
    slope = -VALUE_WEIGHT * math.fsum(errors) / len(errors)
    assert trainee.gradients()["critic.head.bias"] == [pytest.approx(slope, abs=1e-5)]


@EVERY_KIND
def test_small_passes_give_the_gradient_of_large_ones(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    samples = draw_samples(1, 12, tiny_folder)
    how = {**KINDS[kind], "epochs": 1, "minibatches": 1}
    large, report = updated(tiny_folder, tmp_path, samples, **how)
    for micro_tokens in (1, 40):
        small, same = updated(tiny_folder, tmp_path, samples, **how, micro_tokens=micro_tokens)
        assert same == pytest.approx(report, abs=1e-5)
        for name, values in large.gradients().items():
            assert small.gradients()[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


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
    trainee.update(draw_samples(2, 8, tiny_folder))
    before = trainee.weights()
    spoil(trainee, "xxx")
    with pytest.raises(UsageError) as caught:
        trainee.update(draw_samples(2, 8, tiny_folder))
    assert str(caught.value) == (
        "the gradient of train step 2 is not finite; "
        f"lower trainer.{key} and continue from the last checkpoint with --resume"
    )
    assert trainee.weights() == before


def spoil(trainee: Trainee, passes: str) -> None:
    """Make the gradient NaN in the passes that are marked by an x."""
    spoiled: Any = trainee.model if trainee.critic is None else trainee.critic.head
    marks = iter(passes)
    next(spoiled.parameters()).register_hook(lambda gradient: gradient * (math.nan if next(marks) == "x" else 1.0))


@pytest.mark.parametrize("is_large", [False, True])
def test_an_update_with_nothing_to_learn_leaves_policy_and_optimiser_as_they_are(
    is_large: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo", is_large=is_large, weight_decay=0.1)
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
    state = trainee.trainer._optimizer.state_dict()["state"]
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


def fed_rows(trainee: Trainee) -> list[list[int]]:
    """Note which rows each forward pass holds, by their second token, which `draw_samples` numbers."""
    fed: list[list[int]] = []
    trainee.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(sorted(kwargs["input_ids"][:, 1].tolist())), with_kwargs=True
    )
    return fed


def test_minibatches_share_the_rows_out_evenly_and_anew_in_every_epoch(tiny_folder: Path, tmp_path: Path) -> None:
    samples = draw_samples(3, 11, tiny_folder)
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo", epochs=3, minibatches=4)
    fed = fed_rows(trainee)
    orders = []
    for _ in range(2):
        fed.clear()
        trainee.update(samples)
        epochs = [fed[first : first + 4] for first in (0, 4, 8)]
        assert len(fed) == 12
        for epoch in epochs:
            assert sorted(row for part in epoch for row in part) == list(range(3, 14))
            assert sorted(len(part) for part in epoch) == [2, 3, 3, 3]
        orders += epochs
    assert len({str(order) for order in orders}) == 6  # in every epoch of both updates another one


def test_more_minibatches_than_rows_give_each_row_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo", minibatches=8)
    fed = fed_rows(trainee)
    trainee.update(draw_samples(3, 3, tiny_folder))
    assert sorted(fed) == [[3], [4], [5]]


def test_samples_may_come_in_pieces_and_count_once(tiny_folder: Path, tmp_path: Path) -> None:
    samples = draw_samples(4, 8, tiny_folder)
    whole, report = updated(tiny_folder, tmp_path, samples, preset="grpo")
    pieces = Trainee(tiny_folder, tmp_path, preset="grpo")

    async def main() -> dict[str, float]:
        for one in samples:
            await pieces.trainer.accumulate([one])
        return await pieces.trainer.update()

    assert anyio.run(main) == report
    assert pieces.weights() == whole.weights()
    with pytest.raises(ValueError, match="update\\(\\) without samples"):
        pieces.update([])


# --- Learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpo", "reinforce", "ppo"])
def test_what_went_well_becomes_likelier_and_what_did_not_less_likely(
    kind: str, tiny_folder: Path, tmp_path: Path
) -> None:
    good = sample([1, 5, 6], ([7], ()), rewards=[1.0])
    bad = sample([1, 5, 6], ([8], ()), rewards=[0.0])
    trainee = Trainee(tiny_folder, tmp_path, preset=kind, minibatches=1, learning_rate=1e-3)

    def logps() -> tuple[float, float]:
        return completion_logps(trainee.model, good)[0], completion_logps(trainee.model, bad)[0]

    before = logps()
    report = trainee.update([with_logprobs(good, before[:1]), with_logprobs(bad, before[1:])])
    after = logps()
    assert after[0] > before[0] + 1e-4
    assert after[1] < before[1] - 1e-4
    assert report["approx_kl"] == pytest.approx(0.0, abs=1e-7)  # the policy that sampled is the one that learns
    assert report["clip_share"] == 0.0


def test_the_divergence_from_the_reference_pulls_the_policy_towards_it(tiny_folder: Path, tmp_path: Path) -> None:
    # Equal returns: all that is left of the loss is the KL.
    samples = [sample([1, 5, place], ([6], ()), rewards=[1.0]) for place in range(3, 9)]
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo", kl_coefficient=1.0, learning_rate=1e-3, minibatches=1)
    reports = [trainee.update(samples)["reference_kl"] for _ in range(6)]
    assert reports[0] > 0.5
    assert reports[-1] < 0.7 * reports[0]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_samples_of_another_temperature_are_learned_from_at_that_temperature(
    temperature: float, tiny_folder: Path, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("old_logprobs", ["sampled", "recomputed"])
@pytest.mark.parametrize("minibatches", [1, 4])
def test_the_gap_to_the_sampler_is_measured_before_the_weights_change(
    old_logprobs: str, minibatches: int, tiny_folder: Path, tmp_path: Path
) -> None:
    samples = draw_samples(5, 8, tiny_folder)
    how: dict[str, Any] = {"preset": "grpo", "epochs": 1, "minibatches": minibatches, "learning_rate": 0.5}
    trainee = Trainee(tiny_folder, tmp_path, old_logprobs=old_logprobs, **how)
    exact = [with_logprobs(one, logps) for one, logps in zip(samples, trainee.score(samples), strict=True)]
    shifted = [with_logprobs(one, one.logprobs[one.mask] - 0.25) for one in exact]
    assert trainee.update(shifted)["sampler_gap_nats"] == pytest.approx(0.25, abs=1e-5)


def test_an_algorithm_that_lacks_its_critic_or_reference_is_refused_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    settings = TrainerSettings(1e-3, 1e-3, 1.0, 100, 0)
    with pytest.raises(ValueError, match="gae needs a critic"):
        TorchTrainer(object(), catalogue.PRESETS["ppo"], settings, tmp_path)
    with pytest.raises(ValueError, match="needs a reference"):
        TorchTrainer(object(), catalogue.resolve("grpo", {"kl_coefficient": 0.1}), settings, tmp_path)
