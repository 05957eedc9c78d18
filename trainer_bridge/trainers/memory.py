"""Less memory for activations, and how much was used."""

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
    """Compute the activations of each layer again in the backward pass; dropout stays off.

    Raises:
        UsageError: The model cannot, or a layer has dropout of its own, which this would switch on.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        kind = type(model).__name__
        raise UsageError(f"trainer.gradient_checkpointing: {kind} does not support it; set it to false")
    if any(isinstance(rate := getattr(layer, "dropout", 0.0), float) and rate > 0 for layer in layers):
        raise UsageError("trainer.gradient_checkpointing: the model's layers have dropout; set it to false")
    for layer in layers:
        layer.gradient_checkpointing = True
        again: Any = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        layer._gradient_checkpointing_func = again
        layer.training = True  # of the layer alone: the modules inside stay in evaluation mode


def peak_memory_mib(device: torch.device) -> float:
    """Return the largest resident size of this process so far, or on a GPU the most that tensors took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
