"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def adamw(
    module: nn.Module, learning_rate: float, *, weight_decay: float = 0.0, is_fused: bool = False
) -> torch.optim.AdamW:
    """AdamW with the betas that suit short runs.

    Args:
        module: What is trained.
        learning_rate: Step size.
        weight_decay: Of matrices; vectors (gains of norms, biases) have none.
        is_fused: Whether to take the kernel without temporaries of a weight's size; it rounds differently.
    """
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [{"params": weights}]
    if weight_decay:
        groups = [{"params": [weight for weight in weights if weight.ndim > 1]}]
        groups += [{"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True if is_fused else None
    )


def rate_factor(schedule: str, step: int, *, steps: int, warmup_steps: int) -> float:
    """Return what the learning rate is multiplied by in a train step; a function of its number alone, for resuming.

    Args:
        schedule: ``"constant"``, or ``"linear"`` or ``"cosine"``, which fall to 0 at the end of the run.
        step: Number of the train step, from 0.
        steps: Train steps of the run.
        warmup_steps: The rate rises over these first; the last of them has the whole rate.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    share = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    return 1.0 - share if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the step size of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
