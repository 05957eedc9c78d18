"""The forward pass that has attention maps. Axes: B episodes of a pass, H heads, L tokens.

Flash and SDPA attention compute no maps, so the policy is set to eager attention for these passes and set back. Hooks
reduce the maps of a layer to numbers per token before the next layer runs: only those of one layer are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from envkit.trainer_bridge.trainers.batching import lay_out, passes
from envkit.types import Sample

from .maps import Heads, factors, measure, profile
from .part import AttentionCredit


@torch.no_grad()
def measured(model: Any, samples: Sequence[Sample], section: AttentionCredit) -> list[Tensor]:
    """Return the factors of the policy's tokens of each sample, on the CPU. See `maps.factors`."""
    found: dict[int, Tensor] = {}
    with _eager(model):
        for part in passes(samples, section.pass_tokens):
            for number, heads in zip(part, _heads(model, [samples[number] for number in part], section), strict=True):
                waad_L, fai_L = (value_L.cpu() for value_L in profile(heads, section))
                own_L = torch.tensor(samples[number].mask)
                found[number] = factors(waad_L, fai_L, own_L, section)[own_L]
    return [found[number] for number in range(len(samples))]


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _heads(model: Any, samples: Sequence[Sample], section: AttentionCredit) -> list[Heads]:
    """Return what the heads of the chosen layers measure in each episode of a pass.

    The padding is on the right, so that with a causal mask no token of an episode attends to it.
    """
    owns = [torch.tensor(sample.mask, device=model.device) for sample in samples]
    layers = model.base_model.layers
    first, last, steps = len(layers) // 3, 2 * len(layers) // 3, max(section.layers - 1, 1)
    found: list[list[Heads]] = [[] for _ in samples]

    def reduce(module: Any, inputs: Any, output: Any) -> None:
        for row, own_L in enumerate(owns):
            map_HLL = output[1][row, :, : len(own_L), : len(own_L)].float()
            found[row].append(measure(map_HLL, own_L, section))

    chosen = sorted({first + (last - first) * step // steps for step in range(section.layers)})
    hooks = [layers[number].self_attn.register_forward_hook(reduce) for number in chosen]
    try:
        model.base_model(input_ids=lay_out([[one] for one in samples], model.device).ids_BL, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [Heads(*map(torch.cat, zip(*of_layers, strict=True))) for of_layers in found]
