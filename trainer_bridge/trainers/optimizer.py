"""The optimisers, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from envkit.errors import UsageError


def adamw(module: nn.Module, learning_rate: float, *, weight_decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """Return an AdamW optimiser whose betas suit short runs. Vectors (gains of norms, biases) have no weight decay."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [{"params": weights}]
    if weight_decay:
        groups = [{"params": [weight for weight in weights if weight.ndim > 1]}]
        groups += [{"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0}]
    # The fused kernel needs no temporary copies of the weights.
    return [torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)]


def muon(model: Any, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for all other weights.

    With Muon, a policy with random initial weights needs far fewer updates to play frozen lake (`docs/imitation.md`).
    """
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    inner = [weight for weight in model.parameters() if weight.ndim == 2 and id(weight) not in embeddings]
    outer = [weight for weight in model.parameters() if weight.ndim != 2 or id(weight) in embeddings]
    return [
        torch.optim.Muon(inner, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(schedule: str, step: int, *, steps: int, warmup_steps: int) -> float:
    """Return the factor by which the schedule scales the learning rate in a train step.

    Args:
        schedule: ``"constant"``, or ``"linear"`` or ``"cosine"``, which decay to 0 at the end of the run.
        step: Number of the train step, from 0.
        steps: Train steps of the run.
        warmup_steps: Number of train steps at the start over which the rate rises; the last of them has the full rate.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    share = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    return 1.0 - share if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


def clip_gradient(module: nn.Module, max_norm: float, *, number: int, key: str) -> float:
    """Clip the norm of the gradient and return the norm before clipping.

    Raises:
        UsageError: The gradient is not finite, so an update would make every weight NaN. The error names the `number`
            of the update, and its advice is to lower the setting `key`.
    """
    try:
        return float(nn.utils.clip_grad_norm_(module.parameters(), max_norm, error_if_nonfinite=True))
    except RuntimeError as error:
        if "non-finite" not in str(error):  # library's message: torch
            raise
        raise UsageError(
            f"the gradient of {'update' if key.startswith('imitation') else 'train step'} {number} is not finite; "
            f"lower {key} and continue from the last checkpoint with --resume"
        ) from None


def set_rate(optimizers: Sequence[torch.optim.Optimizer], learning_rate: float) -> None:
    """Set the learning rate of all following updates."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
