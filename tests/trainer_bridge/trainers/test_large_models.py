"""What saves memory and time for language models changes the gradient by no more than rounding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from envkit.errors import UsageError
from envkit.trainer_bridge.trainers.batching import SHARED_TIMES, lay_out, row_passes, row_tokens, shared_rows
from envkit.trainer_bridge.trainers.optimizer import rate_factor
from envkit.trainer_bridge.trainers.token_logps import TokenScorer, _hidden, block_logps
from envkit.types import Sample, floats
from tests.trainer_bridge.models import open_model, sample, shake, write_tiny
from tests.trainer_bridge.trainees import KINDS, Trainee, draw_samples
from tests.trainer_bridge.trainers.memory_of_an_update import made, update

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
ONE_UPDATE = {"epochs": 1, "minibatches": 1, "learning_rate": 1e-30, "critic_learning_rate": 1e-30}
SMALL_MODEL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}


def groups(seed: int, *, count: int = 3, members: int = 4, vocabulary: int = 19) -> list[Sample]:
    """Ragged episodes of one to three turns whose groups share the first prompt."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(1, vocabulary) for _ in range(rng.randint(low, high))]

    drawn = []
    for group in range(count):
        prompt = some(3, 8)
        for member in range(members):
            turns = [(some(1, 4), some(1, 3)) for _ in range(rng.randint(1, 3))]
            rewards = [float(member % 2), *(0.5 * turn for turn in range(1, len(turns)))]
            generated = sum(len(one) for one, _ in turns)
            logprobs = [-rng.uniform(1.0, 4.0) for _ in range(generated)]
            drawn.append(sample(prompt, *turns, rewards=rewards, logprobs=logprobs, group=str(group)))
    return drawn


def learned(folder: Path, samples: Sequence[Sample], **how: Any) -> tuple[Trainee, dict[str, float]]:
    trainee = Trainee(folder, folder / "weights", **how)
    return trainee, trainee.update(samples)


def agree(one: Trainee, other: Trainee, *, within: float = 1e-4) -> None:
    """The gradients are equal up to a share of the largest number of each weight."""
    expected = other.gradients()
    assert one.gradients().keys() == expected.keys()
    for name, values in one.gradients().items():
        size = max(abs(value) for value in expected[name])
        assert values == pytest.approx(expected[name], rel=within, abs=within * max(size, 1e-3)), name


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tiny_folder: Path, chat_folder: Path) -> Path:
    return tiny_folder if request.param == "tied" else chat_folder


# --- The whole update ------------------------------------------------------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize("micro_tokens", [10**6, 90, 1])
@pytest.mark.parametrize("packing", [False, True])
def test_blocks_and_shared_or_packed_rows_give_the_gradient_and_report_of_plain_rows(
    kind: str, packing: bool, micro_tokens: int, folder: Path
) -> None:
    samples = groups(1)
    how = {**KINDS[kind], **ONE_UPDATE}
    plain, expected = learned(folder, samples, **how)
    large, report = learned(folder, samples, **how, is_large=True, packing=packing, micro_tokens=micro_tokens)
    assert large.trainer._scorer.shares_rows
    agree(large, plain)
    for name, value in expected.items():
        assert report[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert report["peak_memory_mib"] > 0


def test_a_group_is_read_with_its_prompt_once_and_is_kept_in_one_minibatch(tiny_folder: Path) -> None:
    samples = groups(2, count=4)
    trainee = Trainee(tiny_folder, tiny_folder, preset="grpo", minibatches=2, is_large=True)
    fed: list[tuple[int, int]] = []
    trainee.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["inputs_embeds"].shape[:2])), with_kwargs=True
    )
    trainee.update(samples)
    assert [rows for rows, _ in fed] == [2, 2]  # two groups a minibatch, each one row


def test_gradient_checkpointing_gives_the_same_gradient_and_no_dropout(folder: Path) -> None:
    samples = groups(3)
    how = {**KINDS["ppo"], **ONE_UPDATE, "is_large": True}
    plain, _ = learned(folder, samples, **how)
    saving, _ = learned(folder, samples, **how, gradient_checkpointing=True)
    agree(saving, plain, within=1e-6)
    layers = list(saving.model.base_model.layers)
    assert all(layer.training for layer in layers)
    assert not any(module.training for layer in layers for module in layer.children())


def test_bfloat16_products_keep_the_direction_of_the_gradient_and_the_format_of_the_weights(folder: Path) -> None:
    samples = groups(4)
    how = {**KINDS["ppo"], **ONE_UPDATE, "is_large": True}
    exact, expected = learned(folder, samples, **how)
    rounded, report = learned(folder, samples, **how, precision="bfloat16")
    one, other = (torch.tensor([x for v in trainee.gradients().values() for x in v]) for trainee in (exact, rounded))
    assert 0.99 < float(torch.cosine_similarity(one, other, dim=0)) < 0.9999999
    assert report["entropy_nats"] == pytest.approx(expected["entropy_nats"], rel=0.05)
    assert {weight.dtype for weight in rounded.model.parameters()} == {torch.float32}


# --- Samples without advantage ---------------------------------------------------------------------------------------


def test_samples_without_advantage_are_skipped_and_the_gradient_is_the_same(tiny_folder: Path) -> None:
    samples = groups(5)
    flat = [replace(one, rewards=floats([0.0] * len(one.rewards))) if one.group == "1" else one for one in samples]
    how = {**KINDS["grpo"], **ONE_UPDATE}
    plain, expected = learned(tiny_folder, flat, **how)
    large, report = learned(tiny_folder, flat, **how, is_large=True)
    agree(large, plain)
    assert report["skipped_samples"] == 4
    assert report["learned_tokens"] == sum(one.num_policy_tokens for one in flat if one.group != "1")
    for name in ("policy_loss", "advantage_abs", "grad_norm"):
        assert report[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("changes", [{"entropy_coefficient": 0.01}, {"kl_coefficient": 0.1}])
def test_nothing_is_skipped_where_more_than_the_advantage_is_in_the_loss(changes: Any, tiny_folder: Path) -> None:
    flat = [replace(one, rewards=floats([0.0] * len(one.rewards))) for one in groups(5)]
    _, report = learned(tiny_folder, flat, preset="grpo", **changes, is_large=True)
    assert report["skipped_samples"] == 0


# --- Episodes of several samples -------------------------------------------------------------------------------------


def split(one: Sample) -> list[Sample]:
    """A sample for each turn, whose prompt is all that came before."""
    parts = []
    for turn in np.unique(one.turn_ids[one.mask]):
        own = one.mask & (one.turn_ids == turn)
        end = int(np.flatnonzero(own).max()) + 1
        cut = {name: getattr(one, name)[:end] for name in ("token_ids", "turn_ids", "versions")}
        parts.append(replace(one, mask=own[:end], logprobs=np.where(own, one.logprobs, 0)[:end], **cut))
    return parts


@EVERY_KIND
@pytest.mark.parametrize("is_large", [False, True])
def test_an_episode_in_several_samples_counts_once_and_has_the_gradient_of_one_sample(
    kind: str, is_large: bool, tiny_folder: Path
) -> None:
    samples = draw_samples(7, 8, tiny_folder)
    how = {**KINDS[kind], **ONE_UPDATE}
    whole, expected = learned(tiny_folder, samples, **how)
    parts, report = learned(tiny_folder, [part for one in samples for part in split(one)], **how, is_large=is_large)
    agree(parts, whole)
    assert report.pop("samples") > expected.pop("samples")
    for name, value in expected.items():
        assert report[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


# --- Log-probabilities in blocks -------------------------------------------------------------------------------------


def drawn(*, dtype: torch.dtype, tokens: int = 11, vocabulary: int = 23) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    hidden_NH = torch.randn(tokens, 5, generator=generator, dtype=dtype)
    weight_VH = torch.randn(vocabulary, 5, generator=generator, dtype=dtype)
    return hidden_NH, weight_VH, torch.randint(vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize(("tokens_block", "vocabulary_block"), [(4, 7), (1, 1), (100, 100), (11, 23)])
def test_blocks_of_any_size_give_values_and_gradients_of_plain_autograd(
    tokens_block: int, vocabulary_block: int
) -> None:
    hidden_NH, weight_VH, token_N = drawn(dtype=torch.float32)
    slope_N, pull_N = torch.randn(2, len(token_N), generator=torch.Generator().manual_seed(9))
    found = []
    for in_blocks in (True, False):
        hidden = hidden_NH.clone().requires_grad_()
        weight = weight_VH.clone().requires_grad_()
        weight.grad = torch.ones_like(weight)  # of an earlier pass
        if in_blocks:
            sizes = {"tokens_block": tokens_block, "vocabulary_block": vocabulary_block}
            logp_N, entropy_N = block_logps(hidden, weight, token_N, factor=0.7, **sizes)
        else:
            logp_NV = torch.log_softmax(0.7 * hidden @ weight.T, -1)
            logp_N, entropy_N = logp_NV.gather(1, token_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)
        ((slope_N * logp_N).sum() + (pull_N * entropy_N).sum()).backward()
        assert hidden.grad is not None
        found.append((logp_N, entropy_N, hidden.grad, weight.grad))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_the_logits_of_a_bfloat16_trainer_are_not_rounded_on_a_cpu(tiny_folder: Path) -> None:
    model = open_model(tiny_folder)
    rows = [[one] for one in groups(11)]
    scorer = TokenScorer(model, precision="bfloat16", in_blocks=True)
    with torch.inference_mode():
        with scorer.autocast():
            hidden_NH = _hidden(model, rows)
        logit_NV = hidden_NH.float() @ model.get_output_embeddings().weight.float().T
        token_N = torch.tensor([token for (one,) in rows for token in one.token_ids[one.mask].tolist()])
        expected_N = torch.log_softmax(logit_NV, -1).gather(1, token_N[:, None]).squeeze(1)
        torch.testing.assert_close(scorer.score(rows).logp_N, expected_N, rtol=0, atol=1e-5)


@pytest.mark.parametrize("entropy_has_gradient", [False, True])
def test_a_constant_factor_behind_the_output_layer_is_applied(entropy_has_gradient: bool, tmp_path: Path) -> None:
    made = GraniteForCausalLM(GraniteConfig(**SMALL_MODEL, logits_scaling=3.0))
    shake(made, 13)
    made.save_pretrained(tmp_path)
    coefficient = 0.02 if entropy_has_gradient else 0.0
    how: dict[str, Any] = {"preset": "grpo", "entropy_coefficient": coefficient, **ONE_UPDATE}
    plain, _ = learned(tmp_path, groups(9), **how)
    large, _ = learned(tmp_path, groups(9), **how, is_large=True)
    assert large.trainer._scorer.in_blocks
    agree(large, plain)


def test_a_soft_cap_behind_the_output_layer_leads_to_plain_log_probabilities(tmp_path: Path) -> None:
    made = Gemma2ForCausalLM(Gemma2Config(**SMALL_MODEL, final_logit_softcapping=2.0))
    shake(made, 14)
    made.save_pretrained(tmp_path)
    plain, _ = learned(tmp_path, groups(10), preset="grpo", **ONE_UPDATE)
    large, _ = learned(tmp_path, groups(10), preset="grpo", **ONE_UPDATE, is_large=True)
    assert not TokenScorer(made, in_blocks=True).in_blocks
    agree(large, plain)


def memory_mib(name: str) -> float:
    """Return a figure of this process: VmRSS, what it has, or VmHWM, its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def test_a_large_vocabulary_adds_less_than_256_mib_to_the_peak_of_an_update() -> None:
    # docs/performance.md has the figures for 4,096 tokens a pass and SmolLM2's width. Fewer and a narrow model keep
    # this test short. The state of the optimizer comes after the logits and is larger, so the peak before it counts.
    # Without blocks, the large vocabulary adds about 600 MiB.
    peaks: list[float] = []
    rises: list[float] = []
    hook = register_optimizer_step_pre_hook(lambda *_: peaks.append(memory_mib("VmHWM")))
    try:
        for vocabulary in (1000, 100_000):
            model = made(vocabulary, 192, is_tied=True)
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = memory_mib("VmRSS")
            update(model, 512, is_checkpointing=True)
            gradients = 4 * sum(weight.numel() for weight in model.parameters()) / 2**20
            rises.append(peaks[-1] - before - gradients)
    finally:
        hook.remove()
    assert rises[1] - rises[0] < 256


# --- Rows ------------------------------------------------------------------------------------------------------------


def test_a_row_of_several_samples_is_bounded_and_a_sample_alone_is_not() -> None:
    prompt = [5] * 100
    samples = [sample(prompt, ([6 + number] * 140, ()), group="a", logprobs=[-1.0] * 140) for number in range(5)]
    samples.append(sample(prompt, ([20] * 2000, ()), group="a", logprobs=[-1.0] * 2000))
    samples.append(sample([4], ([6], ()), group="b"))
    assert SHARED_TIMES * 100 == 400  # two times 140 and the prompt fit, three times do not
    assert shared_rows(samples) == [[6], [0, 1], [2, 3], [4], [5]]


def test_a_row_holds_once_what_its_samples_begin_with() -> None:
    samples = [sample([1, 2, 3], ([word], ())) for word in (7, 8)] + [sample([1, 2, 4], ([9], ()))]
    layout = lay_out([samples], torch.device("cpu"))
    assert layout.ids_BL.tolist() == [[1, 2, 3, 7, 8, 4, 9]]
    assert layout.position_BL is not None
    assert layout.position_BL.tolist() == [[0, 1, 2, 3, 3, 2, 3]]
    assert layout.place_N.tolist() == [2, 2, 5]  # the answers 7, 8 and 9 follow 3, 3 and 4
    assert layout.sees_BLL is not None
    assert [torch.nonzero(sees_L).flatten().tolist() for sees_L in layout.sees_BLL[0]] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [0, 1, 5, 6]
    ]  # fmt: skip


# --- Packing ---------------------------------------------------------------------------------------------------------


def test_packing_fills_rows_and_leaves_long_samples_alone() -> None:
    lengths = [600, 500, 400, 300, 1500, 100]
    samples = [
        sample([3 + number], ([5] * (length - 1), ()), group=str(number)) for number, length in enumerate(lengths)
    ]
    (part,) = row_passes(samples, 10**6, shares_rows=True, packs=True)
    assert [[lengths[number] for number in row] for row in part] == [[500, 300, 100], [600, 400], [1500]]
    # A row is no longer than a pass.
    assert all(len(row) == 1 for part in row_passes(samples, 300, shares_rows=True, packs=True) for row in part)


def test_a_packed_row_shares_prefixes_within_its_trees(tiny_folder: Path) -> None:
    samples = groups(2, count=4)
    trainee = Trainee(tiny_folder, tiny_folder, preset="grpo", minibatches=1, is_large=True, packing=True)
    fed: list[tuple[int, int]] = []
    trainee.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["inputs_embeds"].shape[:2])), with_kwargs=True
    )
    trainee.update(samples)
    shared = sum(row_tokens([samples[number] for number in row]) for row in shared_rows(samples))
    assert fed == [(1, shared)]


def test_packing_is_refused_for_a_model_that_ignores_the_mask(tmp_path: Path) -> None:
    made = Gemma2ForCausalLM(Gemma2Config(**SMALL_MODEL, final_logit_softcapping=2.0))
    made.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"^trainer\.packing: not supported by Gemma2ForCausalLM"):
        Trainee(tmp_path, None, preset="grpo", is_large=True, packing=True)


# --- The learning rate -----------------------------------------------------------------------------------------------


def test_the_rate_rises_over_the_warm_up_and_falls_to_zero_at_the_end() -> None:
    def course(schedule: str) -> list[float]:
        return [rate_factor(schedule, step, steps=6, warmup_steps=2) for step in range(7)]

    assert course("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert course("linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    half = 0.5**0.5
    assert course("cosine") == pytest.approx([0.5, 1.0, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0])


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_restored_trainer_continues_the_schedule_bit_for_bit(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {
        **KINDS[kind], "schedule": "cosine", "steps": 5, "schedule_warmup_steps": 2, "weight_decay": 0.1,
        "is_large": True,
    }  # fmt: skip
    unbroken = Trainee(tiny_folder, tmp_path, **how)
    reports = []
    for seed in range(4):
        reports.append(unbroken.update(groups(seed)))
        if seed == 1:
            unbroken.save(tmp_path)
    assert [report["learning_rate"] / 1e-2 for report in reports] == pytest.approx([0.5, 1.0, 1.0, 0.75])
    resumed = Trainee(write_tiny(tmp_path / "other", seed=77), tmp_path, **how)
    resumed.restore(tmp_path)
    for seed in (2, 3):
        report = resumed.update(groups(seed))
        assert {**report, "peak_memory_mib": 0} == {**reports[seed], "peak_memory_mib": 0}
    assert resumed.weights() == unbroken.weights()


def test_weight_decay_shrinks_matrices_and_leaves_norms(tiny_folder: Path) -> None:
    flat = [replace(one, rewards=floats([0.0] * len(one.rewards))) for one in groups(11)]
    before = Trainee(tiny_folder, tiny_folder, preset="grpo")
    how: dict[str, Any] = {"minibatches": 1, "weight_decay": 0.5, "learning_rate": 0.1, "entropy_coefficient": 1e-17}
    after, _ = learned(tiny_folder, flat, preset="grpo", **how)
    shapes = {f"policy.{name}": weight.ndim for name, weight in before.model.named_parameters()}
    for name, values in after.weights().items():
        factor = 0.95 if shapes[name] > 1 else 1.0
        assert values == pytest.approx([factor * value for value in before.weights()[name]], rel=1e-5), name
