"""Rows of several samples, and log-probabilities in blocks: the gradient changes by no more than rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from envkit.errors import UsageError
from envkit.trainer_bridge.trainers.batching import SHARED_TIMES, row_passes, row_tokens, shared_rows
from envkit.trainer_bridge.trainers.learner import rate_factor
from envkit.trainer_bridge.trainers.token_logps import TokenScorer, _hidden, block_logps
from envkit.types import Sample, floats
from tests.trainer_bridge.models import open_model, sample, shake
from tests.trainer_bridge.trainees import KINDS, ONE_UPDATE, Trainee, groups
from tests.trainer_bridge.trainers.memory_of_an_update import made, update
from tests.trainer_bridge.trainers.slow_updates import slow_gradient

MANY = 10**6
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


def learned(folder: Path, samples: Sequence[Sample], **how: Any) -> tuple[Trainee, dict[str, float]]:
    trainee = Trainee(folder, folder / "weights", **how)
    return trainee, trainee.update(samples)


def agree(one: Trainee, expected: Mapping[str, Sequence[float]], *, within: float = 1e-4) -> None:
    """The gradients are equal up to a share of the largest number of each weight."""
    got = one.gradients()
    for name, values in expected.items():
        size = max(map(abs, values))
        assert got[name] == pytest.approx(values, rel=within, abs=within * max(size, 1e-3)), name


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tiny_folder: Path, chat_folder: Path) -> Path:
    return tiny_folder if request.param == "tied" else chat_folder


# --- The whole update ------------------------------------------------------------------------------------------------


def test_gradient_checkpointing_gives_the_same_gradient_and_no_dropout(chat_folder: Path) -> None:
    folder, samples = chat_folder, groups(3)
    how = {**KINDS["ppo"], **ONE_UPDATE}
    plain, _ = learned(folder, samples, **how)
    saving, _ = learned(folder, samples, **how, gradient_checkpointing=True)
    agree(saving, plain.gradients(), within=1e-6)
    layers = list(saving.model.base_model.layers)
    assert all(layer.training for layer in layers)
    assert not any(module.training for layer in layers for module in layer.children())


def test_bfloat16_products_keep_the_direction_of_the_gradient_and_the_format_of_the_weights(chat_folder: Path) -> None:
    folder, samples = chat_folder, groups(4)
    how = {**KINDS["ppo"], **ONE_UPDATE}
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
    trainee, report = learned(tiny_folder, flat, **KINDS["grpo"], **ONE_UPDATE)
    expected, parts = slow_gradient(trainee, flat)
    agree(trainee, expected)
    assert report["skipped_samples"] == 4
    assert report["learned_tokens"] == sum(one.num_policy_tokens for one in flat if one.group != "1")
    for name in ("policy_loss", "advantage_abs", "grad_norm"):
        assert report[name] == pytest.approx(parts[name], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("changes", [{"entropy_coefficient": 0.01}, {"kl": {"coefficient": 0.1}}])
def test_nothing_is_skipped_where_more_than_the_advantage_is_in_the_loss(changes: Any, tiny_folder: Path) -> None:
    flat = [replace(one, rewards=floats([0.0] * len(one.rewards))) for one in groups(5)]
    _, report = learned(tiny_folder, flat, preset="grpo", **changes)
    assert report["skipped_samples"] == 0


# --- Log-probabilities in blocks -------------------------------------------------------------------------------------


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("tokens_block", "vocabulary_block"), [(4, 7), (100, 100)])
def test_blocks_of_any_size_give_values_and_gradients_of_plain_autograd(
    tokens_block: int, vocabulary_block: int
) -> None:
    hidden_NH, weight_VH = torch.randn(11, 5, generator=seeded(7)), torch.randn(23, 5, generator=seeded(8))
    token_N = torch.randint(23, (11,), generator=seeded(9))
    slope_N, pull_N = torch.randn(2, 11, generator=seeded(10))
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
    scorer = TokenScorer(model, precision="bfloat16")
    with torch.inference_mode():
        with scorer.autocast():
            hidden_NH = _hidden(model, rows)
        logit_NV = hidden_NH.float() @ model.get_output_embeddings().weight.float().T
        token_N = torch.tensor([token for (one,) in rows for token in one.token_ids[one.mask].tolist()])
        expected_N = torch.log_softmax(logit_NV, -1).gather(1, token_N[:, None]).squeeze(1)
        torch.testing.assert_close(scorer.score(rows).logp_N, expected_N, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "in_blocks"),
    [
        (GraniteForCausalLM(GraniteConfig(**SMALL_MODEL, logits_scaling=3.0)), True),
        (Gemma2ForCausalLM(Gemma2Config(**SMALL_MODEL, final_logit_softcapping=2.0)), False),
    ],
)
def test_what_follows_the_output_layer_is_applied(model: Any, in_blocks: bool, tmp_path: Path) -> None:
    shake(model, 13)
    model.save_pretrained(tmp_path)
    trainee, _ = learned(tmp_path, groups(9), preset="grpo", entropy_coefficient=0.02, **ONE_UPDATE)
    assert trainee.scorer.in_blocks is in_blocks
    agree(trainee, slow_gradient(trainee, groups(9))[0])


@pytest.mark.parametrize("is_together", [False, True])
def test_autograd_through_a_scorer_equals_that_through_whole_distributions(is_together: bool, folder: Path) -> None:
    temperature = 0.7
    model, samples = open_model(folder), groups(11)
    scorer = TokenScorer(model, temperature=temperature)
    rows = shared_rows(samples, MANY) if is_together else [[number] for number in range(len(samples))]
    chosen = [samples[number] for row in rows for number in row]
    slope_N, pull_N = torch.randn(2, sum(one.num_policy_tokens for one in chosen), generator=seeded(9))
    scored = scorer.score([[samples[number] for number in row] for row in rows], entropy_has_gradient=True)
    logp, entropy = [], []
    for one in chosen:
        logit_LV = model(input_ids=torch.tensor([one.token_ids.tolist()])).logits[0]
        logp_NV = torch.log_softmax(logit_LV[:-1][torch.tensor(one.mask.tolist()[1:])] / temperature, -1)
        logp.append(logp_NV.gather(1, torch.tensor(one.token_ids[one.mask].tolist())[:, None])[:, 0])
        entropy.append(-(logp_NV.exp() * logp_NV).sum(-1))
    found, expected = (
        torch.autograd.grad((slope_N * logp_N).sum() + (pull_N * entropy_N).sum(), [*model.parameters()])
        for logp_N, entropy_N in (scored, (torch.cat(logp), torch.cat(entropy)))
    )
    for got, dense in zip(found, expected, strict=True):
        torch.testing.assert_close(got, dense, rtol=1e-4, atol=1e-5 * float(dense.abs().max()))


def memory_mib(name: str) -> float:
    """Return a figure of this process: VmRSS, what it has, or VmHWM, its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def test_a_large_vocabulary_adds_less_than_256_mib_to_the_peak_of_an_update() -> None:
    # docs/performance.md has the figures for 4,096 tokens a pass and SmolLM2's width. Fewer and a narrow model keep
    # this test short. The state of the optimizer comes after the logits and is larger, so the peak before it counts.
    # Without blocks, the large vocabulary adds more than 400 MiB.
    peaks: list[float] = []
    rises: list[float] = []
    hook = register_optimizer_step_pre_hook(lambda *_: peaks.append(memory_mib("VmHWM")))
    try:
        for vocabulary in (1000, 100_000):
            model = made(vocabulary, 64, is_tied=True)
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
    assert shared_rows(samples, MANY) == [[6], [0, 1], [2, 3], [4], [5]]
    assert shared_rows(samples, 300) == [[6], [0], [1], [2], [3], [4], [5]]  # no more than a pass holds


def test_rows_are_shared_only_if_that_saves_a_quarter_of_the_tokens() -> None:
    for prompt, is_shared in ((4, False), (6, True)):  # of 2 * (prompt + 5) tokens, the prompt is saved once
        samples = [sample([5] * prompt, ([word] * 5, ())) for word in (7, 8)]
        assert row_passes(samples, MANY, shares_rows=True) == ([[[0, 1]]] if is_shared else [[[0], [1]]])


# --- Packing ---------------------------------------------------------------------------------------------------------


def test_packing_fills_rows_and_leaves_long_samples_alone() -> None:
    lengths = [600, 500, 400, 300, 1500, 100]
    samples = [
        sample([3 + number], ([5] * (length - 1), ()), group=str(number)) for number, length in enumerate(lengths)
    ]
    (part,) = row_passes(samples, MANY, shares_rows=True, packs=True)
    assert [[lengths[number] for number in row] for row in part] == [[500, 300, 100], [600, 400], [1500]]
    # A row is no longer than a pass.
    assert all(len(row) == 1 for part in row_passes(samples, 300, shares_rows=True, packs=True) for row in part)


def test_a_packed_row_shares_prefixes_within_its_trees(tiny_folder: Path) -> None:
    samples = groups(3, count=4)
    trainee = Trainee(tiny_folder, None, preset="grpo", minibatches=1, packing=True)
    fed: list[tuple[int, int]] = []
    trainee.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["input_ids"].shape[:2])), with_kwargs=True
    )
    assert trainee.update(samples)["skipped_samples"] == 0
    shared = sum(row_tokens([samples[number] for number in row]) for row in shared_rows(samples, MANY))
    assert fed == [(1, shared)]


def test_packing_is_refused_for_a_model_that_ignores_the_mask(tmp_path: Path) -> None:
    made = Gemma2ForCausalLM(Gemma2Config(**SMALL_MODEL, final_logit_softcapping=2.0))
    made.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"^trainer\.packing: not supported by Gemma2ForCausalLM"):
        Trainee(tmp_path, None, preset="grpo", packing=True)


# --- The learning rate -----------------------------------------------------------------------------------------------


def test_the_rate_rises_over_the_warm_up_and_falls_to_zero_at_the_end() -> None:
    def course(schedule: str) -> list[float]:
        return [rate_factor(schedule, step, steps=6, warmup_steps=2) for step in range(7)]

    assert course("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert course("linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    half = 0.5**0.5
    assert course("cosine") == pytest.approx([0.5, 1.0, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0])


def test_weight_decay_shrinks_matrices_and_leaves_norms(tiny_folder: Path) -> None:
    flat = [replace(one, rewards=floats([0.0] * len(one.rewards))) for one in groups(11)]
    before = Trainee(tiny_folder, tiny_folder, preset="grpo")
    how: dict[str, Any] = {"minibatches": 1, "weight_decay": 0.5, "learning_rate": 0.1, "entropy_coefficient": 1e-17}
    after, _ = learned(tiny_folder, flat, preset="grpo", **how)
    shapes = {f"policy.{name}": weight.ndim for name, weight in before.model.named_parameters()}
    for name, values in after.weights().items():
        factor = 0.95 if shapes[name] > 1 else 1.0
        assert values == pytest.approx([factor * value for value in before.weights()[name]], rel=1e-5), name
