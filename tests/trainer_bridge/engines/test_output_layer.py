"""The output layer: which product it computes. Tensors without data stand for those of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GraniteConfig, GraniteForCausalLM

from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.output_layer import logits_of, widen
from envkit.trainer_bridge.trainers.token_logps import block_logps
from tests.trainer_bridge.models import open_model


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the types of arguments and result of each matrix product."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            self.seen.append((args[0].dtype, result.dtype))
        return result


WIDE = (torch.bfloat16, torch.float32)
NARROW = (torch.bfloat16, torch.bfloat16)
PLAIN = (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("meta", torch.bfloat16, WIDE),
        ("meta", torch.float32, PLAIN),
        ("cpu", torch.bfloat16, NARROW),
        ("cpu", torch.float32, PLAIN),
    ],
)
def test_only_a_bfloat16_product_off_the_cpu_has_a_float32_result(
    device: str, dtype: torch.dtype, expected: tuple[torch.dtype, torch.dtype]
) -> None:
    hidden_NH, weight_VH = (torch.ones(size, 4, device=device, dtype=dtype) for size in (3, 5))
    with Products() as products:
        result = logits_of(hidden_NH, weight_VH)
    assert (products.seen, result.dtype, tuple(result.shape)) == ([expected], torch.float32, (3, 5))


def test_the_blocks_of_the_trainer_keep_logits_in_float32() -> None:
    hidden_NH = torch.empty(3, 4, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight_VH = torch.empty(5, 4, device="meta", dtype=torch.float32)
    token_N = torch.empty(3, device="meta", dtype=torch.long)
    with Products() as products:
        # The backward pass looks up indices, which tensors without data do not have: the products before it are enough.
        logp_N, entropy_N = block_logps(hidden_NH, weight_VH, token_N)
    assert (products.seen, logp_N.dtype, entropy_N.dtype) == ([WIDE], torch.float32, torch.float32)


def test_an_engine_off_the_cpu_samples_from_logits_in_float32() -> None:
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = GraniteConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, logits_scaling=3.0)
    with torch.device("meta"):
        model: Any = GraniteForCausalLM(config)
    model.to(torch.bfloat16).eval()
    TransformersEngine(model, pad_id=0)
    with torch.inference_mode(), Products() as products:
        output = model(input_ids=torch.ones(2, 3, dtype=torch.long, device="meta"), logits_to_keep=1)
    assert (products.seen[-1], output.logits.dtype, tuple(output.logits.shape)) == (WIDE, torch.float32, (2, 1, 40))


def test_a_model_on_a_cpu_keeps_its_own_output_layer(tiny_folder: Path) -> None:
    model = open_model(tiny_folder).bfloat16()
    widen(model)
    assert "forward" not in vars(model.get_output_embeddings())


def test_an_output_layer_with_a_bias_is_left_as_it_is() -> None:
    class Biased(nn.Module):
        head = nn.Linear(4, 5, device="meta", dtype=torch.bfloat16)

        def get_output_embeddings(self) -> nn.Linear:
            return self.head

    model = Biased()
    widen(model)
    assert "forward" not in vars(model.head)
