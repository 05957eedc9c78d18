"""What attention maps say about tokens: how far each looks back, how much later tokens look at it, and its factor.

Axes: H heads, L tokens of an episode; in a map, the second axis (position t) attends to the third (position s <= t).
Numbers of tokens that are not the policy's are 0 (factors: 1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .part import AttentionCredit


class Heads(NamedTuple):
    """What a head measures: its mean distance, and the WAAD and the FAI of each token. All are linear in its map, so
    that their means over heads are those of the mean map.
    """

    distance_H: Tensor
    waad_HL: Tensor
    fai_HL: Tensor


def measure(map_HLL: Tensor, own_L: Tensor, section: AttentionCredit) -> Heads:
    """Return what heads measure with their maps. `own_L` is true for tokens of the policy.

    The distance of a head is the mean of sum_s map[t, s] * (t - s) over the policy's tokens t,
    WAAD[t] = sum_s map[t, s] * min(t - s, window), and FAI[s] the mean of map[t, s] over the policy's tokens t from
    s + horizon[0] to s + horizon[1], or 0 if there are none.
    """
    place_L = torch.arange(len(own_L), device=own_L.device)
    back_LL = (place_L[:, None] - place_L).clamp(min=0)
    nearest, farthest = section.horizon
    counts_LL = own_L[:, None] & (nearest <= back_LL) & (back_LL <= farthest)
    distance_HL = torch.einsum("hts,ts->ht", map_HLL, back_LL.to(map_HLL))
    waad_HL = torch.einsum("hts,ts->ht", map_HLL, back_LL.clamp(max=section.window).to(map_HLL))
    fai_HL = torch.einsum("hts,ts->hs", map_HLL, counts_LL.to(map_HLL)) / counts_LL.sum(0).clamp(min=1)
    return Heads(distance_HL[:, own_L].mean(1), waad_HL * own_L, fai_HL * own_L)


def profile(heads: Heads, section: AttentionCredit) -> tuple[Tensor, Tensor]:
    """Return the mean WAAD of the heads with the smallest distances, and the mean FAI of those with the largest [L]."""
    order_H = heads.distance_H.argsort(stable=True)
    count = _count(section.heads, len(order_H))
    return heads.waad_HL[order_H[:count]].mean(0), heads.fai_HL[order_H[-count:]].mean(0)


def factors(waad_L: Tensor, fai_L: Tensor, own_L: Tensor, section: AttentionCredit) -> Tensor:
    """Return the factor of each token [L].

    Preplan tokens are the `share` with the largest change[t] = |WAAD[t] - WAAD[t + 1]| within a turn, and anchors the
    `share` with the largest FAI. With the bonus b = amplification - 1, preplan tokens (local) or anchors (global) have
    the factor 1 + b.

    coupled: An anchor is locally dominated if its WAAD is at most the (lower) median and one of the `introduction`
    tokens before it is a preplan token. It has the factor 1 + (1 - handover) * b. Its introduction is the one of these
    tokens with the largest change, which has handover * b in addition to what it has as an anchor.
    """
    change_L = torch.zeros_like(waad_L)
    change_L[:-1] = (waad_L[:-1] - waad_L[1:]).abs() * (own_L[:-1] & own_L[1:])
    is_preplan_L, is_anchor_L = (_top(value_L, own_L, section.share) for value_L in (change_L, fai_L))
    bonus_L = (is_preplan_L if section.strategy == "local" else is_anchor_L).to(waad_L)
    if section.strategy == "coupled":
        dominated, introductions = [], set[int]()
        median = waad_L[own_L].median()
        for anchor in (is_anchor_L & (waad_L <= median)).nonzero().flatten().tolist():
            before = slice(max(anchor - section.introduction, 0), anchor)
            if is_preplan_L[before].any():
                dominated.append(anchor)
                introductions.add(before.start + int(change_L[before].argmax()))
        bonus_L[dominated] = 1 - section.handover
        bonus_L[sorted(introductions)] += section.handover
    return 1 + (section.amplification - 1) * bonus_L


def _top(value_L: Tensor, own_L: Tensor, share: float) -> Tensor:
    """Return which of the policy's tokens are the `share` with the largest positive values, and those equal to them."""
    own_N = value_L[own_L]
    least = own_N.topk(_count(share, len(own_N))).values[-1]
    return own_L & (value_L >= least) & (value_L > 0)


def _count(share: float, number: int) -> int:
    """Return a share of a number, rounded up, and at least 1."""
    return max(math.ceil(round(share * number, 6)), 1)
