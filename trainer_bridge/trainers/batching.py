"""Samples to rows and passes of tensors. Axes: B rows, L tokens, N tokens that carry loss.

A row holds one sample, or several that begin with the same prompt: the prompt once, then each sample's own tokens as a
branch. Branches restart at the position behind the prompt, and a mask hides them from each other, so the model computes
for every token what it would compute in a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from envkit.types import Sample

SHARED_ROW_TOKENS = 1024
"""Bound on a row of several samples; its mask has the square of this as elements."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows as a model takes them.

    Attributes:
        ids_BL: Token ids, padded on the right.
        position_BL: Position of each token; None if every row is one sample.
        sees_BLL: Whether a token (second axis) attends to another (third axis); None for a plain causal mask.
        row_N: Row of each token that carries loss, sample after sample.
        place_N: Place in the row of the token before it.
    """

    ids_BL: Tensor
    position_BL: Tensor | None
    sees_BLL: Tensor | None
    row_N: Tensor
    place_N: Tensor


def cut(lengths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Cut rows into passes of similar length, at most `micro_tokens` tokens each with padding (at least one row)."""
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        if not parts or (len(parts[-1]) + 1) * lengths[row] > micro_tokens:  # this row is the longest so far
            parts.append([])
        parts[-1].append(row)
    return parts


def passes(samples: Sequence[Sample], micro_tokens: int) -> list[list[int]]:
    """Cut samples into passes, one sample a row; see `cut`."""
    return cut([len(sample.token_ids) for sample in samples], micro_tokens)


def shared_rows(samples: Sequence[Sample]) -> list[list[int]]:
    """Put samples of one group that begin with the same prompt into rows of at most `SHARED_ROW_TOKENS` tokens."""
    rows: list[list[int]] = []
    open_row: dict[tuple[str, tuple[int, ...]], tuple[list[int], int]] = {}
    for number, sample in enumerate(samples):
        prompt = prompt_length(sample)
        key = (sample.group, sample.token_ids[:prompt])
        row, used = open_row.get(key, ([], prompt))
        branch = len(sample.token_ids) - prompt
        if row and used + branch > SHARED_ROW_TOKENS:
            row, used = [], prompt
        if not row:
            rows.append(row)
        row.append(number)
        open_row[key] = (row, used + branch)
    return rows


def prompt_length(sample: Sample) -> int:
    """Return the number of tokens before the policy's first one."""
    return sample.mask.index(1) if 1 in sample.mask else len(sample.mask)


def row_tokens(samples: Sequence[Sample]) -> int:
    """Return the tokens of a row of samples that begin with the same prompt."""
    prompt = prompt_length(samples[0])
    return prompt + sum(len(sample.token_ids) - prompt for sample in samples)


def lay_out(rows: Sequence[Sequence[Sample]], device: torch.device) -> Layout:
    """Lay rows of samples out as tensors; the samples of a row begin with the same prompt."""
    longest = max(row_tokens(row) for row in rows)
    ids, positions, branches = [], [], []
    row_N: list[int] = []
    place_N: list[int] = []
    for number, row in enumerate(rows):
        prompt = prompt_length(row[0]) if len(row) > 1 else 0
        row_ids = list(row[0].token_ids[:prompt])
        row_positions, row_branches = list(range(prompt)), [0] * prompt
        for branch, sample in enumerate(row, 1):
            shift = len(row_ids) - prompt
            for place, said in enumerate(sample.mask):
                if said:
                    row_N.append(number)
                    # The token before a branch's first one is the prompt's last.
                    place_N.append(place - 1 if place <= prompt else place - 1 + shift)
            row_ids += sample.token_ids[prompt:]
            row_positions += range(prompt, len(sample.token_ids))
            row_branches += [branch] * (len(sample.token_ids) - prompt)
        padding = longest - len(row_ids)
        ids.append(row_ids + [0] * padding)
        positions.append(row_positions + [0] * padding)
        branches.append(row_branches + [-1] * padding)
    ids_BL = torch.tensor(ids, device=device)
    row_index_N, place_index_N = torch.tensor(row_N, device=device), torch.tensor(place_N, device=device)
    if all(len(row) == 1 for row in rows):
        # Padding is on the right and carries no loss, so under a causal mask it needs no mask of its own.
        return Layout(ids_BL, None, None, row_index_N, place_index_N)
    branch_BL = torch.tensor(branches, device=device)
    same_BLL = (branch_BL[:, None, :] == branch_BL[:, :, None]) | (branch_BL[:, None, :] == 0)
    sees_BLL = same_BLL & torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    return Layout(ids_BL, torch.tensor(positions, device=device), sees_BLL, row_index_N, place_index_N)


def said(sample: Sample, values: Sequence[Any]) -> list[Any]:
    """Return those of `values` [L] that belong to tokens of the policy."""
    return [value for value, own in zip(values, sample.mask, strict=True) if own]


def flat(rows: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Join rows of numbers to one tensor [N]."""
    return torch.tensor([value for row in rows for value in row], device=device, dtype=dtype)
