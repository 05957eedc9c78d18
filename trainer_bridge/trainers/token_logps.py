"""Log-probabilities and entropies of the policy's tokens.

Axes: B rows, L tokens, N tokens that contribute to the loss, V vocabulary, H hidden size. R is a block of the N tokens,
and W a block of the vocabulary V.

The plain computation stores V log-probabilities for each of N tokens. With a language model, they take most of the
memory. `TokenScorer` instead computes in blocks of tokens and vocabulary, and recomputes each block in the backward
pass, if the model allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from envkit.types import Sample, bools, floats, ints

from ..algorithms import terms
from ..output_layer import logits_of
from .batching import flat, lay_out

_TOKENS_BLOCK = 1024
_VOCABULARY_BLOCK = 8192
_PROBE_TOKENS = 8


class Scored(NamedTuple):
    """The log-probability of each token [N], and the entropy of its distribution [N], both in nats."""

    logp_N: Tensor
    entropy_N: Tensor


def token_logps(model: Any, samples: Sequence[Sample], *, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities (nats) over the vocabulary for each token with mask 1 [N, V], sample by sample.

    To save memory, the output layer processes only the positions directly before these tokens.
    """
    layout = lay_out([[sample] for sample in samples], model.device)
    kept = sorted(set(layout.place_N.tolist()))
    number = {place: position for position, place in enumerate(kept)}
    kept_tensor = torch.tensor(kept, device=model.device)
    output = model(input_ids=layout.ids_BL, use_cache=False, logits_to_keep=kept_tensor)
    at_N = torch.tensor([number[place] for place in layout.place_N.tolist()], device=model.device)
    return torch.log_softmax(output.logits[layout.row_N, at_N].float() / temperature, dim=-1)


class TokenScorer:
    """Computes log-probabilities and entropies of the policy's tokens.

    Args:
        model: A causal language model.
        temperature: Sampling temperature, which divides the logits.
        precision: ``"float32"``, or ``"bfloat16"`` for autocast. Log-softmax and entropy are always computed in
            float32. In blocks, so is the output layer on a CPU; on a GPU, its products are bfloat16, and its results
            float32.

    Attributes:
        in_blocks: Whether log-probabilities are computed in blocks. This is false if the model's logits are not the
            result of a linear layer without bias times a constant factor, for example because of a soft cap.
        shares_rows: Whether rows may contain several samples. This is false if `in_blocks` is false or the model
            ignores the mask that separates the samples.
    """

    def __init__(self, model: Any, *, temperature: float = 1.0, precision: str = "float32") -> None:
        self._model = model
        self._temperature = temperature
        self._precision = precision
        self._logit_scale = _logit_scale(model)
        self.in_blocks = self._logit_scale is not None
        self.shares_rows = self.in_blocks and _shares_rows(model)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context manager in which matrix products are computed in `precision`."""
        if self._precision == "float32":
            return nullcontext()
        return torch.autocast(self._model.device.type, torch.bfloat16)

    def score(self, rows: Sequence[Sequence[Sample]], *, entropy_has_gradient: bool = False) -> Scored:
        """Compute log-probabilities and entropies of the policy's tokens in `rows`, sample by sample.

        Args:
            rows: The samples of each row; a row may have several samples only if `shares_rows` is true.
            entropy_has_gradient: Whether the entropy is part of the loss and therefore needs a gradient.
        """
        samples = [sample for row in rows for sample in row]
        token_N = flat([sample.token_ids[sample.mask] for sample in samples], self._model.device, torch.long)
        with self.autocast():
            if self._logit_scale is None:
                logp_NV = token_logps(self._model, samples, temperature=self._temperature)
                logp_N = logp_NV.gather(1, token_N[:, None]).squeeze(1)
                return Scored(logp_N, terms.entropy(logp_NV if entropy_has_gradient else logp_NV.detach()))
            hidden_NH = _hidden(self._model, rows)
        if hidden_NH.device.type == "cpu":
            # Rounding the logits to bfloat16 makes up a third of the error of the log-probabilities.
            hidden_NH = hidden_NH.to(torch.promote_types(hidden_NH.dtype, torch.float32))
        elif self._precision != "float32":
            hidden_NH = hidden_NH.to(torch.bfloat16)
        weight_VH = self._model.get_output_embeddings().weight
        factor = self._logit_scale / self._temperature
        logp_N, entropy_N = block_logps(hidden_NH, weight_VH, token_N, factor=factor)
        return Scored(logp_N, entropy_N if entropy_has_gradient else entropy_N.detach())


def _hidden(model: Any, rows: Sequence[Sequence[Sample]]) -> Tensor:
    """Return the input of the output layer for each token that contributes to the loss [N, H]."""
    layout = lay_out(rows, model.device)
    inputs: dict[str, Any] = {"input_ids": layout.ids_BL}
    if layout.sees_BLL is not None:
        mask: Tensor = layout.sees_BLL[:, None]  # the same mask for all heads
        if (
            model.config._attn_implementation == "eager"
        ):  # Eager attention needs a mask of numbers, which it adds to the scores.
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.bfloat16).min)
        inputs |= {"attention_mask": mask, "position_ids": layout.position_BL}
    hidden_BLH = model.base_model(**inputs, use_cache=False).last_hidden_state
    hidden_NH: Tensor = hidden_BLH[layout.row_N, layout.place_N]
    return hidden_NH


def block_logps(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    token_N: Tensor,
    *,
    factor: float = 1.0,
    tokens_block: int = _TOKENS_BLOCK,
    vocabulary_block: int = _VOCABULARY_BLOCK,
) -> Scored:
    """Compute log-probabilities of `token_N` and entropies under ``softmax(factor * hidden @ weight.T)``, in blocks.

    Matrix products have the dtype of `hidden_NH` (for their results, see `logits_of`); all other operations have at
    least float32.
    """
    blocks = (tokens_block, vocabulary_block)
    return Scored(*_BlockLogps.apply(hidden_NH, weight_VH, token_N, factor, blocks))  # type: ignore[no-untyped-call]


class _BlockLogps(torch.autograd.Function):
    """See `block_logps`."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, token_N: Tensor, factor: float, blocks: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        hidden_NH = hidden_NH.contiguous()
        size, wide = len(token_N), torch.promote_types(hidden_NH.dtype, torch.float32)
        highest_N = torch.full((size,), -torch.inf, dtype=wide, device=hidden_NH.device)
        total_N, mean_N, chosen_N = (torch.zeros_like(highest_N) for _ in range(3))
        for columns, block_WH in _vocabulary_in(weight_VH, hidden_NH.dtype, blocks[1]):
            for rows in _blocks(size, blocks[0]):
                logit_RW = logits_of(hidden_NH[rows], block_WH).mul_(factor)
                offset_R = token_N[rows] - columns.start
                is_here_R = (offset_R >= 0) & (offset_R < len(block_WH))
                found_R = logit_RW.gather(1, offset_R.clamp(0, len(block_WH) - 1)[:, None]).squeeze(1)
                chosen_N[rows] = torch.where(is_here_R, found_R, chosen_N[rows])
                before_R = highest_N[rows].clone()
                highest_N[rows] = torch.maximum(before_R, logit_RW.amax(1))
                shrunk_R = (before_R - highest_N[rows]).exp_()
                share_RW = (logit_RW - highest_N[rows][:, None]).exp_()
                total_N[rows] = total_N[rows] * shrunk_R + share_RW.sum(1)
                mean_N[rows] = mean_N[rows] * shrunk_R + share_RW.mul_(logit_RW).sum(1)
        norm_N = highest_N + total_N.log()
        entropy_N = norm_N - mean_N / total_N
        ctx.save_for_backward(hidden_NH, weight_VH, token_N, norm_N, entropy_N)
        ctx.factor, ctx.blocks = factor, blocks
        ctx.set_materialize_grads(False)
        return chosen_N - norm_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None]:
        slope_N, entropy_slope_N = grad_outputs
        hidden_NH, weight_VH, token_N, norm_N, entropy_N = ctx.saved_tensors
        wide = norm_N.dtype
        if slope_N is None:
            slope_N = torch.zeros_like(norm_N)
        gradient_NH = torch.zeros_like(hidden_NH, dtype=wide)
        gradient_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        for columns, block_WH in _vocabulary_in(weight_VH, hidden_NH.dtype, ctx.blocks[1]):
            for rows in _blocks(len(token_N), ctx.blocks[0]):
                # d logp / d logit = (is chosen) - p;  d entropy / d logit = -p * (log p + entropy)
                logp_RW = logits_of(hidden_NH[rows], block_WH).mul_(ctx.factor).sub_(norm_N[rows][:, None])
                weight_RW = -slope_N[rows][:, None]
                if entropy_slope_N is None:
                    pull_RW = logp_RW.exp_().mul_(weight_RW)
                else:
                    weight_RW = weight_RW - entropy_slope_N[rows][:, None] * (logp_RW + entropy_N[rows][:, None])
                    pull_RW = logp_RW.exp_().mul_(weight_RW)
                offset_R = token_N[rows] - columns.start
                is_here_R = (offset_R >= 0) & (offset_R < len(block_WH))
                here_R = is_here_R.nonzero().squeeze(1)
                pull_RW[here_R, offset_R[here_R]] += slope_N[rows][here_R]
                pull_RW = pull_RW.mul_(ctx.factor).to(hidden_NH.dtype)
                gradient_NH[rows] += pull_RW @ block_WH
                if gradient_VH is not None:
                    gradient_VH[columns] += pull_RW.T @ hidden_NH[rows]
        return gradient_NH.to(hidden_NH.dtype), gradient_VH, None, None, None


def _vocabulary_in(weight_VH: Tensor, dtype: torch.dtype, block: int) -> Iterator[tuple[slice, Tensor]]:
    for columns in _blocks(len(weight_VH), block):
        yield columns, weight_VH[columns].to(dtype)


def _blocks(size: int, block: int) -> list[slice]:
    return [slice(first, min(first + block, size)) for first in range(0, size, block)]


@torch.no_grad()
def _logit_scale(model: Any) -> float | None:
    """Return the factor between the result of the output layer and the model's logits; None if it is not constant.

    The factor is measured on a few tokens, since models differ in what follows the output layer (scaling, soft caps).
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    bias = getattr(head, "bias", None)
    if type(head) is not nn.Linear or bias is not None or getattr(config, "final_logit_softcapping", None):
        return None
    ids_BL = torch.tensor([_trial_ids(head.out_features)], device=model.device)
    try:
        hidden_BLH = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
        product_BLV = functional.linear(hidden_BLH, head.weight).float()
        logit_BLV = model(input_ids=ids_BL, use_cache=False).logits.float()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    scale = float((product_BLV * logit_BLV).sum() / product_BLV.square().sum())
    scale = 1.0 if abs(scale - 1.0) < 1e-4 else scale
    rtol = _tolerance(model)
    fits = torch.allclose(product_BLV * scale, logit_BLV, rtol=rtol, atol=rtol / 10 * float(logit_BLV.abs().max()))
    return scale if fits else None


@torch.no_grad()
def _shares_rows(model: Any) -> bool:
    """Return whether samples that share a row give the same result as in separate rows, measured on a few tokens."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if model.config._attn_implementation not in ("sdpa", "eager") or layer_types != {"full_attention"}:
        return False
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return False
    ids = _trial_ids(model.get_output_embeddings().out_features)
    one, other = (_probe([*ids, *reversed(ids[:length])], _PROBE_TOKENS) for length in (3, 5))
    try:
        apart_NH, together_NH = _hidden(model, [[one], [other]]), _hidden(model, [[one, other]])
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False
    tolerance = _tolerance(model)
    return torch.allclose(apart_NH, together_NH, rtol=tolerance, atol=tolerance * float(apart_NH.abs().max()))


def _trial_ids(vocabulary: int) -> list[int]:
    """Return ordinary tokens for a trial pass: the first ones are often special, with results that rounding changes."""
    return [(vocabulary // 2 + number) % vocabulary for number in range(_PROBE_TOKENS)]


def _tolerance(model: Any) -> float:
    """Return the relative difference by which rounding may change the results of a trial pass."""
    return 1e-3 if model.dtype == torch.float32 else 3e-2


def _probe(ids: Sequence[int], prompt: int) -> Sample:
    own = [place >= prompt for place in range(len(ids))]
    zeros = [0] * len(ids)
    return Sample("probe", ints(ids), bools(own), floats(zeros), ints(zeros), floats([0.0]), ints(zeros), "probe")
