"""An update in the plain way: one token of one sample after another, and one sample per pass."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from envkit.trainer_bridge.algorithms.critic import Critic
from envkit.types import Sample
from tests.golden import slow
from tests.trainer_bridge.trainees import Trainee, completion_logps


def slow_advantages(trainee: Trainee, samples: Sequence[Sample]) -> list[list[float]]:
    """Advantages of every turn of every sample, in plain Python."""
    assert trainee.algorithm.advantage is not None
    section: Any = trainee.algorithm.advantage.section
    rewards = [one.rewards.tolist() for one in samples]
    if section.kind == "group_normalised":
        return slow.group_normalised(rewards, [one.group for one in samples], section.gamma)
    if section.kind == "batch_normalised":
        return slow.normalised([slow.returns(one, section.gamma) for one in rewards])
    values = [slow_values(trainee.critics[0], one) for one in samples]
    estimates = [slow.gae(*pair, section.gamma, section.gae_lambda) for pair in zip(rewards, values, strict=True)]
    return slow.normalised(estimates)


def slow_values(critic: Critic, one: Sample) -> list[float]:
    """A critic's estimates, of prefixes that end where each turn's completion begins."""
    values = []
    for turn in range(len(one.rewards)):
        begin = next(
            place for place, (own, of) in enumerate(zip(one.mask, one.turn_ids, strict=True)) if own and of == turn
        )
        with torch.no_grad():
            hidden_BLH = critic.body(input_ids=torch.tensor([one.token_ids[:begin].tolist()])).last_hidden_state
            values.append(critic.head(hidden_BLH[0, -1]).item())
    return values


def slow_loss(trainee: Trainee, samples: Sequence[Sample]) -> tuple[Any, dict[str, float]]:
    """The loss of an update over all samples, and what is reported of it."""
    algorithm, section = trainee.algorithm, trainee.algorithm.section
    loss_section: Any = algorithm.loss.section
    sums: defaultdict[str, float] = defaultdict(float)
    whole: Any = 0.0
    tokens = sum(one.num_policy_tokens for one in samples)
    learned = 0
    for one, worth in zip(samples, slow_advantages(trainee, samples), strict=True):
        if not any(worth) and not section.entropy_coefficient and not section.kl.coefficient:
            continue
        learned += one.num_policy_tokens
        own = tokens if algorithm.aggregation.section.kind == "token_mean" else one.num_policy_tokens * len(samples)
        logits_LV = trainee.model(input_ids=torch.tensor([one.token_ids.tolist()]), use_cache=False).logits[0].double()
        references = iter(completion_logps(trainee.reference, one) if trainee.reference is not None else ())
        for place in [place for place, own in enumerate(one.mask) if own]:
            chance_V = torch.softmax(logits_LV[place - 1], dim=-1)
            logp, sampled = chance_V[one.token_ids[place]].log(), float(one.logprobs[place])
            old = logp.item() if section.old_logprobs == "recomputed" else sampled
            advantage = worth[one.turn_ids[place]]
            ratio = (logp - old).exp()
            moved = ratio.item()
            if loss_section.kind == "reinforce":
                loss: Any = -advantage * logp
            else:
                edge = 1 + loss_section.clip_high if advantage > 0 else 1 - loss_section.clip_low
                held = moved > edge if advantage > 0 else moved < edge
                if advantage < 0 and moved > loss_section.dual_clip:
                    edge, held = loss_section.dual_clip, True
                loss = -advantage * (logp * 0 + edge if held else ratio)
                sums["clip_share"] += float(held and advantage != 0)
            if algorithm.correction is not None:
                loss = loss * slow.tis(old, sampled, algorithm.correction.section.cap)  # type: ignore[attr-defined]
            entropy = -(chance_V * chance_V.log()).sum()
            sums["policy_loss"] += loss.item()
            sums["entropy_nats"] += entropy.item()
            sums["advantage_abs"] += abs(advantage)
            sums["approx_kl"] += moved - 1 - math.log(moved)
            sums["sampler_gap_nats"] += abs(logp.item() - sampled)
            loss = loss - section.entropy_coefficient * entropy
            if trainee.reference is not None:
                difference = next(references) - logp
                kl = difference.exp() - 1 - difference
                sums["reference_kl"] += kl.item()
                loss = loss + section.kl.coefficient * kl
            whole = whole + loss / own
    of_all = ("policy_loss", "advantage_abs", "reference_kl")
    return whole, {
        "learned_tokens": float(learned),
        **{name: value / (tokens if name in of_all else learned) for name, value in sums.items()},
    }


def slow_gradient(trainee: Trainee, samples: Sequence[Sample]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The policy's gradient of an update over all samples, and what is reported of it."""
    loss, report = slow_loss(trainee, samples)
    named = {name: weight for name, weight in trainee.model.named_parameters() if weight.requires_grad}
    gradients = dict(zip(named, torch.autograd.grad(loss, [*named.values()]), strict=True))
    norm = math.sqrt(sum(float(one.double().square().sum()) for one in gradients.values()))
    return {f"policy.{name}": one.flatten().tolist() for name, one in gradients.items()}, {**report, "grad_norm": norm}
