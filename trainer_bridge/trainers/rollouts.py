"""The inputs of an advantage, from the samples of a train step. Axes: E episodes, T turns, K critics, N tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from envkit.types import Floats, Sample, floats

from ..algorithms.algorithm import Algorithm
from ..algorithms.critic import policy_turns
from ..algorithms.parts import Rollouts, Segments
from ..algorithms.terms import kl_estimate, overlong_penalty
from .batching import TrainRows, flat


def rollouts_of(
    rows: TrainRows,
    algorithm: Algorithm,
    values: Sequence[Tensor],
    ends: Sequence[Tensor],
    entropies: Sequence[Floats],
    *,
    kl_coefficient: float,
) -> Rollouts:
    """Return what an advantage is given: the rewards are less the penalties that the algorithm names.

    Args:
        rows: The samples, with the log-probabilities of the old policy and of the reference policy.
        algorithm: The algorithm.
        values: What the critics estimate, sample by sample [K, turns or tokens]; empty without a critic.
        ends: What they estimate after the last policy token of each sample [K]; empty without a critic.
        entropies: Entropies of the old policy, sample by sample; empty if they were not computed.
        kl_coefficient: Weight of the divergence from the reference policy.
    """
    section, per_token = algorithm.section, "token_values" in algorithm.needs
    samples, segments = rows.samples, rows.segments(range(len(rows.samples)))
    first: dict[int, Sample] = {}
    for number, sample in zip(rows.rollouts, samples, strict=True):
        first.setdefault(number, sample)
    episodes = [first[number] for number in sorted(first)]
    turns = max(len(episode.rewards) for episode in episodes)
    reward_ET = _padded([episode.rewards for episode in episodes], turns)
    turn_mask_ET = _padded([np.ones_like(episode.rewards) for episode in episodes], turns)
    if section.overlong is not None:
        penalty_E = overlong_penalty(segments.rollout_N.bincount(minlength=len(episodes)), section.overlong)
        reward_ET[range(len(episodes)), turn_mask_ET.sum(1).long() - 1] -= penalty_E
    token_reward_N = _token_rewards(reward_ET, turn_mask_ET, segments)
    old_N, reference_N = flat(rows.old, None), flat(rows.reference, None) if rows.reference else None
    if reference_N is not None and section.kl.place == "reward":
        penalty_N = kl_coefficient * kl_estimate(old_N, reference_N, section.kl.estimator)
        token_reward_N -= penalty_N
        reward_ET.index_put_((segments.rollout_N, segments.turn_N), -penalty_N, accumulate=True)
    critics = len(values[0]) if len(values) else 0
    value_KET = torch.zeros(0 if per_token else critics, *reward_ET.shape)
    if not per_token:
        for row, sample, value_KM in zip(rows.rollouts, samples, values, strict=bool(values)):
            value_KET[:, row, policy_turns(sample)] = value_KM
    after_KE = torch.zeros(critics, len(episodes))
    newest: dict[int, int] = {}
    for row, sample, end_K in zip(rows.rollouts, samples, ends, strict=bool(ends)):
        turn = int(sample.turn_ids[sample.mask][-1])
        if turn >= newest.get(row, 0):
            newest[row], after_KE[:, row] = turn, end_K
    names, nothing = sorted({name for episode in episodes for name in episode.named_rewards}), floats(())
    named = {
        name: _padded([one.named_rewards.get(name, nothing) for one in episodes], turns) * turn_mask_ET
        for name in names
    }
    return Rollouts(
        reward_ET,
        turn_mask_ET,
        value_KET,
        after_KE,
        _padded([one.observations.view(np.int64) for one in episodes], turns),
        [one.group for one in episodes],
        [one.member for one in episodes],
        [None if one.is_graded else one.stop for one in episodes],
        segments,
        token_reward_N,
        flat([sample.logprobs[sample.mask] for sample in samples], None),
        old_N,
        reference_N,
        flat(entropies, None) if entropies else None,
        torch.cat([*values], 1) if per_token else None,
        named,
        samples,
    )


def _padded(rows: Sequence[NDArray[Any]], length: int) -> Tensor:
    """Return arrays as the rows of one array, with zeros after them [E, length]."""
    whole = np.zeros((len(rows), length), dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        whole[number, : len(row)] = row[:length]
    return torch.from_numpy(whole)


def _token_rewards(reward_ET: Tensor, turn_mask_ET: Tensor, segments: Segments) -> Tensor:
    """Return the rewards of turns by token; see `Rollouts.token_reward_N`."""
    turns = reward_ET.shape[1]
    key_N = (segments.rollout_N * turns + segments.turn_N).numpy()
    order = np.argsort(key_N, kind="stable")
    sorted_N = key_N[order]
    key_M = np.flatnonzero(turn_mask_ET.numpy())
    place_M = np.searchsorted(sorted_N, key_M, side="right") - 1  # the last token of the turn, or of one before it
    is_other_M = (place_M < 0) | (sorted_N[place_M] // turns != key_M // turns)
    reward_N = np.zeros(len(key_N))
    np.add.at(reward_N, order[place_M + is_other_M], reward_ET.numpy().ravel()[key_M])
    return torch.from_numpy(reward_N).float()
