"""Gradient checkpointing, and measurement of peak memory."""

from __future__ import annotations

import resource
import sys
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from envkit.errors import UsageError


def checkpoint_layers(model: nn.Module) -> None:
    """Make each layer recompute its activations in the backward pass; dropout remains off.

    Raises:
        UsageError: The model does not support gradient checkpointing, or a layer has dropout, which gradient
            checkpointing would turn on.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        kind = type(model).__name__
        raise UsageError(f"trainer.gradient_checkpointing: not supported by {kind}; set this key to false")
    if any(isinstance(rate := getattr(layer, "dropout", 0.0), float) and rate > 0 for layer in layers):
        raise UsageError("trainer.gradient_checkpointing: not supported by layers with dropout; set this key to false")
    for layer in layers:
        layer.gradient_checkpointing = True
        recompute: Any = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        layer._gradient_checkpointing_func = recompute
        # Checkpointing requires the layer's training flag. The layer's submodules remain in evaluation mode.
        layer.training = True


def peak_memory_mib(device: torch.device) -> float:
    """Return this process's peak memory in MiB: on a CPU, all its resident memory; on a GPU, its allocated tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
