"""Packing samples into rows and passes. Axes: B rows, L tokens, N tokens that contribute to the loss.

A row contains one sample, or several samples with a common prefix. Several samples form a prefix tree, in which the
tokens that they share, such as a system prompt, occur once. With packing, a row may contain several trees. Each token
has the same position as in its sample, and a mask limits its attention to the preceding tokens of its samples. The
result is therefore the same as with one sample per row. A pass is a batch of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from envkit.types import Floats, Ints, Sample, floats, ints

from ..algorithms.parts import Segments

SHARED_ROW_TOKENS = 256
"""Maximum number of tokens in a row of several samples. If `SHARED_TIMES` the length of the common prefix is larger, it
is the maximum instead. Long rows are slow: the cost of attention and mask grows with the square of the row's length,
but the gain only with the prefix's length.
"""

SHARED_TIMES = 4

_WORTH_SHARING = 0.25
"""Share of tokens that common prefixes must save: attention with a mask is slower than plain causal attention."""

PACKED_ROW_TOKENS = 1024
"""Maximum number of tokens in a row of samples without a common prefix."""


@dataclass(frozen=True, slots=True)
class TrainRows:
    """Samples and the inputs of their losses, before padding; each list has an entry per sample.

    Attributes:
        samples: The samples.
        rollouts: The number of the sample's rollout.
        advantages: The advantages of its policy tokens.
        old: The old log-probabilities of its policy tokens.
        factors: The correction's factors of its policy tokens; empty without a correction.
        targets: What each critic learns for its turns or policy tokens [K, turns or tokens]; empty without a critic.
        reference: The log-probabilities of its policy tokens under the reference policy; empty without one.
        values: What each critic estimated before the first update, like `targets`.
        prepared: What `Part.prepare` of the loss returned for its policy tokens; empty without it.
        entropy_weights: Factors of the entropy bonus of its policy tokens; empty if all are 1.
        kl_coefficient: Weight of the divergence from the reference policy in the loss.
        divergence: The mean divergence of the old policy from the reference policy; 0 without one.
        version: Version of the weights that the samples train.
    """

    samples: Sequence[Sample]
    rollouts: Sequence[int]
    advantages: Sequence[Floats]
    old: Sequence[Floats]
    factors: Sequence[Floats]
    targets: Sequence[Tensor]
    reference: Sequence[Floats]
    values: Sequence[Tensor] = ()
    prepared: Sequence[Floats] = ()
    entropy_weights: Sequence[Floats] = ()
    kl_coefficient: float = 0.0
    divergence: float = 0.0
    version: int = 0

    def without_ignored(self) -> TrainRows:
        """Return the rows without the tokens that nothing is learned from; see `envkit.types.Sample.ignored`.

        What was computed for the others, such as their advantages, stays as it is.
        """
        if not any(sample.ignored.any() for sample in self.samples):
            return self
        keeps = [~sample.ignored[sample.mask] for sample in self.samples]
        turns = [sample.turn_ids[sample.mask] for sample in self.samples]
        kept_turns = [np.isin(np.unique(own), own[keep]) for own, keep in zip(turns, keeps, strict=True)]

        by_token = ("advantages", "old", "factors", "reference", "prepared", "entropy_weights")
        chosen: dict[str, Any] = {
            name: [value[keep] for value, keep in zip(values, keeps, strict=True)]
            for name in by_token
            if (values := getattr(self, name))
        }

        def estimates(values: Sequence[Tensor]) -> list[Tensor]:
            """Choose among what critics estimate: one value for each token, or for each turn."""
            found = []
            for value_KM, of_tokens, of_turns in zip(values, keeps, kept_turns, strict=bool(values)):
                is_kept = of_tokens if value_KM.shape[1] == len(of_tokens) else of_turns
                found.append(value_KM[:, torch.from_numpy(is_kept)])
            return found

        samples = [
            replace(
                sample,
                mask=(mask := sample.mask & ~sample.ignored),
                logprobs=np.where(mask, sample.logprobs, 0),
                ignored=np.zeros_like(mask),
            )
            for sample in self.samples
        ]
        return replace(
            self,
            samples=samples,
            targets=estimates(self.targets),
            values=estimates(self.values),
            **chosen,
        )

    def segments(self, indices: Sequence[int], device: torch.device | None = None) -> Segments:
        """Return what the policy tokens of the samples at `indices` belong to."""
        sizes = [self.samples[row].num_policy_tokens for row in indices]
        place: dict[str, int] = {}
        groups = [place.setdefault(self.samples[row].group, len(place)) for row in indices]
        rollout_N, sample_N, group_N = (
            torch.from_numpy(np.repeat(np.array(one, dtype=np.int64), sizes))
            for one in ([self.rollouts[row] for row in indices], indices, groups)
        )
        turn_N = flat([self.samples[row].turn_ids[self.samples[row].mask] for row in indices], None, torch.long)
        return Segments(*(one.to(device) for one in (rollout_N, sample_N, turn_N, group_N)))

    def split(self, value_N: Tensor) -> list[Floats]:
        """Divide one value per policy token among the samples."""
        ends = np.cumsum([sample.num_policy_tokens for sample in self.samples])[:-1]
        return [floats(part) for part in np.split(value_N.numpy(), ends)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors that describe rows of samples as the input of a model.

    Attributes:
        ids_BL: Token ids, padded on the right.
        position_BL: Position of each token in its sample; None if every row is one sample.
        sees_BLL: Whether a token (second axis) attends to another token (third axis); None means a plain causal mask.
        row_N: Index of the row of each token that contributes to the loss, sample after sample.
        place_N: For each of these tokens, the index in the row of the preceding token, whose logits predict the token.
    """

    ids_BL: Tensor
    position_BL: Tensor | None
    sees_BLL: Tensor | None
    row_N: Tensor
    place_N: Tensor


def minibatches(
    groups: Sequence[str], tokens: Sequence[int], parts: int, epochs: int, *, seed: int
) -> Iterator[list[int]]:
    """Yield the sample indices of each update. An epoch has each sample once, and the samples of a group together.

    An epoch has `parts` updates, or fewer if there are fewer groups, with similar numbers of policy tokens (`tokens`).
    """
    # Take the remainder, so that the seed is in torch's range.
    order = torch.Generator().manual_seed(seed % (1 << 63))
    rows_of: dict[str, list[int]] = {}
    for row in sorted(range(len(groups)), key=lambda row: groups[row]):
        rows_of.setdefault(groups[row], []).append(row)
    units = [(sum(tokens[row] for row in rows), rows) for rows in rows_of.values()]
    for _ in range(epochs):
        shuffled = [units[number] for number in torch.randperm(len(units), generator=order).tolist()]
        sizes, chosen = [0] * min(parts, len(units)), [list[int]() for _ in range(min(parts, len(units)))]
        for size, rows in sorted(shuffled, key=lambda unit: -unit[0]):  # the longest first, each to the smallest part
            smallest = sizes.index(min(sizes))
            sizes[smallest] += size
            chosen[smallest] += rows
        yield from map(sorted, chosen)


def without_repeats(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples without turns that an earlier sample of the same episode has."""
    seen: set[tuple[str, int]] = set()
    kept = []
    for sample in samples:
        turns = np.unique(sample.turn_ids[sample.mask]).tolist()
        repeated = [turn for turn in turns if (sample.episode, turn) in seen]
        seen |= {(sample.episode, turn) for turn in turns}
        if repeated:
            mask = sample.mask & ~np.isin(sample.turn_ids, repeated)
            sample = replace(sample, mask=mask, logprobs=np.where(mask, sample.logprobs, 0))
        if sample.mask.any():
            kept.append(sample)
    return kept


def cut(lengths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Split rows with these lengths into passes of similar lengths. Return the indices of the rows of each pass.

    A pass has at most `micro_tokens` tokens, including padding. A row that is longer than that gets its own pass.
    """
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        # Rows are sorted by length, so this row is the longest so far.
        if not parts or (len(parts[-1]) + 1) * lengths[row] > micro_tokens:
            parts.append([])
        parts[-1].append(row)
    return parts


def passes(samples: Sequence[Sample], micro_tokens: int) -> list[list[int]]:
    """Split samples into passes with one sample per row; return the indices of each pass's samples. See `cut`."""
    return cut([len(sample.token_ids) for sample in samples], micro_tokens)


def row_passes(
    samples: Sequence[Sample],
    micro_tokens: int,
    *,
    shares_rows: bool,
    packs: bool = False,
    together: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Split samples into passes of rows; see `cut`. In the result, a row is a list of the indices of its samples.

    Args:
        samples: The samples.
        micro_tokens: Maximum number of tokens in a pass, including padding.
        shares_rows: Whether samples with a common prefix share a row; if false, each sample has a separate row.
        packs: Whether samples without a common prefix share rows, too; only with `shares_rows`.
        together: A number for each sample; samples with the same number are in the same pass. Such a pass has at most
            `micro_tokens` tokens without its padding, unless one number has more. None: no such condition.
    """
    if together is not None:
        rows_of: dict[int, list[int]] = {}
        for number, one in enumerate(together):
            rows_of.setdefault(one, []).append(number)
        lengths = [sum(len(samples[number].token_ids) for number in unit) for unit in rows_of.values()]
        units = [*rows_of.values()]
        found: list[list[list[int]]] = []
        for part in cut(lengths, micro_tokens):
            chosen = [number for place in part for number in units[place]]
            inner = row_passes(
                [samples[number] for number in chosen], micro_tokens, shares_rows=shares_rows, packs=packs
            )
            found.append([[chosen[place] for place in row] for rows in inner for row in rows])
        return found
    rows = [[number] for number in range(len(samples))]
    if shares_rows:
        shared, whole = shared_rows(samples, micro_tokens), sum(len(sample.token_ids) for sample in samples)
        if sum(row_tokens([samples[number] for number in row]) for row in shared) <= (1 - _WORTH_SHARING) * whole:
            rows = shared
    if packs and shares_rows:
        rows = packed_rows(rows, samples, min(PACKED_ROW_TOKENS, micro_tokens))
    lengths = [row_tokens([samples[number] for number in row]) for row in rows]
    return [[rows[place] for place in part] for part in cut(lengths, micro_tokens)]


def shared_rows(samples: Sequence[Sample], micro_tokens: int) -> list[list[int]]:
    """Group samples with a common prefix into rows of limited length (see `SHARED_ROW_TOKENS`).

    A row has at most `micro_tokens` tokens, unless one sample has more. Return the indices of the samples of each row,
    sorted by the samples' token ids.
    """
    rows: list[list[int]] = []
    used = 0
    before: Ints = ints(())
    # The bytes of big-endian numbers sort as the numbers do.
    order = [sample.token_ids.astype(">i4").tobytes() for sample in samples]
    for number in sorted(range(len(samples)), key=lambda number: (order[number], number)):
        ids = samples[number].token_ids
        common = _common(before, ids)
        bound = min(max(SHARED_ROW_TOKENS, SHARED_TIMES * common), micro_tokens)
        if not rows or not common or used + len(ids) - common > bound:
            rows.append([])
            used = common = 0
        rows[-1].append(number)
        used += len(ids) - common
        before = ids
    return rows


def packed_rows(rows: Sequence[Sequence[int]], samples: Sequence[Sample], row_tokens_limit: int) -> list[list[int]]:
    """Join rows to rows of at most `row_tokens_limit` tokens: the longest first, each to the first row with room."""
    lengths = [row_tokens([samples[number] for number in row]) for row in rows]
    packed: list[list[int]] = []
    used: list[int] = []
    for place in sorted(range(len(rows)), key=lambda place: (-lengths[place], place)):
        free = (number for number, size in enumerate(used) if size + lengths[place] <= row_tokens_limit)
        if (number := next(free, None)) is None:
            number = len(packed)
            packed.append([])
            used.append(0)
        packed[number] += rows[place]
        used[number] += lengths[place]
    return packed


def row_tokens(samples: Sequence[Sample]) -> int:
    """Return the length in tokens of a row that contains `samples` in this order.

    A sample shares tokens with the sample before it, so samples with a common prefix must follow each other.
    """
    shared = sum(_common(before.token_ids, after.token_ids) for before, after in itertools.pairwise(samples))
    return sum(len(sample.token_ids) for sample in samples) - shared


def lay_out(rows: Sequence[Sequence[Sample]], device: torch.device) -> Layout:
    """Build the tensors for `rows`. The order of the samples in a row is that of `row_tokens`."""
    longest = max(row_tokens(row) for row in rows)
    ids_BL = torch.zeros(len(rows), longest, dtype=torch.long)
    position_BL = torch.zeros(len(rows), longest, dtype=torch.long)
    is_shared = any(len(row) > 1 for row in rows)
    # Padding needs no special mask: it is on the right, so with a causal mask no sample's token attends to it.
    sees_BLL = torch.eye(longest, dtype=torch.bool).repeat(len(rows), 1, 1) if is_shared else None
    row_N: list[Ints] = []
    place_N: list[Ints] = []
    for row, samples in enumerate(rows):
        used = 0
        path: Ints = ints(())  # the index in the row of each token of the sample
        before: Ints = ints(())
        for sample in samples:
            common, length = _common(before, sample.token_ids), len(sample.token_ids)
            new = slice(used, used + length - common)
            path = np.concatenate([path[:common], np.arange(new.start, new.stop, dtype=np.int32)])
            used, before = new.stop, sample.token_ids
            ids_BL[row, new] = torch.tensor(sample.token_ids[common:], dtype=torch.long)
            position_BL[row, new] = torch.arange(common, length)
            if sees_BLL is not None:
                sees_BLL[row, new, path[:common]] = True
                sees_BLL[row, new, new] |= torch.ones(length - common, length - common).tril().bool()
            before_own = path[np.flatnonzero(sample.mask) - 1]
            row_N.append(np.full(len(before_own), row, dtype=np.int32))
            place_N.append(before_own)
    row_index_N, place_index_N = flat(row_N, device, torch.long), flat(place_N, device, torch.long)
    if sees_BLL is None:
        return Layout(ids_BL.to(device), None, None, row_index_N, place_index_N)
    return Layout(ids_BL.to(device), position_BL.to(device), sees_BLL.to(device), row_index_N, place_index_N)


def _common(one: Ints, other: Ints) -> int:
    """Return the length of the common prefix of two sequences."""
    shorter = min(len(one), len(other))
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if len(different) else shorter


def flat(rows: Sequence[NDArray[Any]], device: torch.device | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Concatenate arrays into one tensor [N]."""
    return torch.from_numpy(np.concatenate(rows)).to(device, dtype)
