"""The output layer of a language model, whose logits are not rounded to bfloat16.

Axes: B rows, L and N tokens, H width, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def logits_of(hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """Return ``hidden @ weight.T`` in at least float32.

    On a GPU, the numbers of a bfloat16 product are not rounded to bfloat16. A CPU cannot do this: there, the result has
    the precision of the arguments.
    """
    if hidden_NH.device.type != "cpu" and hidden_NH.dtype == torch.bfloat16:
        return torch.mm(hidden_NH, weight_VH.T, out_dtype=torch.float32)
    return (hidden_NH @ weight_VH.T).to(torch.promote_types(hidden_NH.dtype, torch.float32))


def widen(model: Any) -> None:
    """Let a bfloat16 model on a GPU compute its logits by `logits_of`. Other models are left as they are."""
    head = model.get_output_embeddings()
    is_plain = type(head) is nn.Linear and head.bias is None
    if is_plain and head.weight.device.type != "cpu" and head.weight.dtype == torch.bfloat16:
        head.forward = partial(_wide_forward, head)


def _wide_forward(head: nn.Linear, hidden_BLH: Tensor) -> Tensor:
    return logits_of(hidden_BLH.flatten(0, -2), head.weight).view(*hidden_BLH.shape[:-1], -1)
