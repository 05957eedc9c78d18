"""The critic: one estimate per turn, from the tokens before the completion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from envkit.trainer_bridge.algorithms.critic import Critic
from tests.trainer_bridge.models import open_model, sample, shake


def critic_of(folder: Path) -> Critic:
    critic = Critic(open_model(folder))
    shake(critic, seed=4)
    return critic


def test_a_new_critic_expects_nothing_and_starts_from_the_policys_body(tiny_folder: Path) -> None:
    model = open_model(tiny_folder)
    critic = Critic(model)
    assert critic([sample([1, 5], ([6], (7,)), ([8], ()))]).tolist() == [0.0, 0.0]
    for own, other in zip(critic.body.parameters(), model.model.parameters(), strict=True):
        assert torch.equal(own, other)
        assert own.data_ptr() != other.data_ptr()  # a copy, which learns for itself


def test_an_estimate_is_that_of_the_prompt_alone(tiny_folder: Path) -> None:
    critic = critic_of(tiny_folder)
    whole = critic([sample([1, 5, 6], ([7, 8], (9, 10)), ([11], (12,)), ([13, 3], ()))]).tolist()
    prompts = [[1, 5, 6], [1, 5, 6, 7, 8, 9, 10], [1, 5, 6, 7, 8, 9, 10, 11, 12]]
    for value, prompt in zip(whole, prompts, strict=True):
        with torch.no_grad():
            hidden_BLH = critic.body(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state
            assert value == pytest.approx(critic.head(hidden_BLH[0, -1]).item(), abs=1e-5)
    assert len({round(value, 3) for value in whole}) == 3


def test_estimates_are_not_rounded_to_bfloat16(tiny_folder: Path) -> None:
    critic = critic_of(tiny_folder)
    with torch.no_grad():
        critic.head.weight.zero_()
        critic.head.bias.fill_(0.7001)
    with torch.autocast("cpu", torch.bfloat16):
        (value,) = critic([sample([1, 5], ([6], ()))]).tolist()
    assert value == pytest.approx(0.7001, abs=1e-6)


def test_the_estimate_at_the_end_is_that_after_the_last_policy_token(tiny_folder: Path) -> None:
    critic = critic_of(tiny_folder)
    one = sample([1, 5, 6], ([7], (9,)), ([11, 8], ()))
    with torch.no_grad():
        plain, with_end = critic([one]), critic([one], ends=True)
        last = int(one.mask.nonzero()[0][-1])
        hidden_LH = critic.body(input_ids=torch.tensor([one.token_ids[: last + 1].tolist()])).last_hidden_state[0]
        expected = critic.head(hidden_LH[-1])
    assert with_end.tolist() == pytest.approx([*plain.tolist(), expected.item()], abs=1e-6)
