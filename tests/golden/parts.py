"""Parts of an algorithm by name, on plain lists: tensors are only in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from envkit.config import kinds
from envkit.trainer_bridge.algorithms.algorithm import Chosen
from envkit.trainer_bridge.algorithms.parts import Rollouts, Segments, Tokens
from envkit.types import StopReason

JUNK = 99.0
"""Stands where no turn exists; a result that depends on it is wrong."""

Rows = Sequence[Sequence[float]]


class Worth(NamedTuple):
    """The result of an advantage: a value per turn of each episode, and the targets of each critic."""

    advantages: list[list[float]]
    targets: list[list[list[float]]]


class Loss(NamedTuple):
    """The result of a loss: a value per token, further values per token, and the gradient of the sum."""

    losses: list[float]
    metrics: dict[str, list[float]]
    gradient: list[float]


def part(family: str, settings: str | Mapping[str, Any], *inputs: Any, **more: Any) -> Any:
    """Return the result of a part of `family`; `settings` are its kind or its section.

    advantages: rewards of each episode; values of each critic, groups, stops. A turn has one token. Returns `Worth`.
    losses: lists of log-probabilities, old ones and advantages. Returns `Loss`.
    aggregations: the rollout of each token; its sample. Returns a list.
    corrections: lists of old and sampled log-probabilities, and the rollout of each token. Returns a list.
    """
    content = {"kind": settings} if isinstance(settings, str) else settings
    section = kinds.find(family, content["kind"]).section.model_validate(content)
    return _CALLS[family](Chosen.of(family, section), *inputs, **more)


def padded(rows: Rows) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[JUNK] * (longest - len(row))] for row in rows])


def mask_of(rows: Rows) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in rows])


def _advantages(
    chosen: Chosen,
    rewards: Rows,
    *,
    values: Sequence[Rows] = (),
    groups: Sequence[str] | None = None,
    stops: Sequence[StopReason | None] | None = None,
) -> Worth:
    size, mask_ET = len(rewards), mask_of(rewards)
    rollout_N, turn_N = mask_ET.nonzero(as_tuple=True)
    value_KET = torch.stack([padded(one) for one in values]) if values else torch.zeros(0, *mask_ET.shape)
    logp_N = torch.full(rollout_N.shape, JUNK)
    rollouts = Rollouts(
        padded(rewards),
        mask_ET,
        value_KET,
        torch.zeros(mask_ET.shape, dtype=torch.int64),
        groups or ["same"] * size,
        stops or [None] * size,
        Segments(rollout_N, rollout_N, turn_N),
        logp_N,
        logp_N,
    )
    made = chosen(rollouts)
    ends = [len(row) for row in rewards]
    target_KET = torch.zeros(0, *mask_ET.shape) if made.target_KET is None else made.target_KET
    return Worth(
        [one.tolist() for one in made.advantage_N.split(ends)],
        [[row[:end] for row, end in zip(target_ET.tolist(), ends, strict=True)] for target_ET in target_KET],
    )


def _losses(chosen: Chosen, logp: Sequence[float], old: Sequence[float], advantage: Sequence[float]) -> Loss:
    logp_N, old_N, advantage_N = (torch.tensor(one, dtype=torch.float64) for one in (logp, old, advantage))
    logp_N.requires_grad_()
    tokens = Tokens(logp_N, old_N, old_N, None, torch.zeros_like(old_N), advantage_N, _segments([0] * len(logp)))
    made = chosen(tokens)
    (gradient_N,) = torch.autograd.grad(made.loss_N.sum(), logp_N)
    metrics = {name: value_N.tolist() for name, value_N in made.metrics.items()}
    return Loss(made.loss_N.tolist(), metrics, gradient_N.tolist())


def _aggregations(chosen: Chosen, rollouts: Sequence[int], samples: Sequence[int] | None = None) -> list[float]:
    weights: list[float] = chosen(_segments(rollouts, samples)).tolist()
    return weights


def _corrections(
    chosen: Chosen, old: Sequence[float], sampled: Sequence[float], rollouts: Sequence[int] | None = None
) -> list[float]:
    old_N, sampled_N = (torch.tensor(one, dtype=torch.float64) for one in (old, sampled))
    factors: list[float] = chosen(old_N, sampled_N, _segments(rollouts or [0] * len(old))).tolist()
    return factors


def _segments(rollouts: Sequence[int], samples: Sequence[int] | None = None) -> Segments:
    rollout_N = torch.tensor(rollouts, dtype=torch.int64)
    sample_N = rollout_N if samples is None else torch.tensor(samples, dtype=torch.int64)
    return Segments(rollout_N, sample_N, torch.zeros_like(rollout_N))


_CALLS: Mapping[str, Callable[..., Any]] = {
    "advantages": _advantages,
    "losses": _losses,
    "aggregations": _aggregations,
    "corrections": _corrections,
}
