"""LoRA adapters: trained low-rank matrices beside the frozen linear layers of a model, by the package peft.

The layers are replaced in place, so all other modules of the model keep their places. The files of an adapter have
peft's format: `ADAPTER_CONFIG` and `ADAPTER_WEIGHTS` in a folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from envkit.errors import UsageError
from envkit.runs.files import share_weights

from ..models.saved_policy import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .files import ADAPTER, fill, is_of_adapter, merged

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Settings of a new adapter.

    Attributes:
        rank: Rank of the matrices.
        alpha: The adapter's output is multiplied by ``alpha / rank``.
        targets: Names of the layers with an adapter; empty for all linear layers except the output layer.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()


def add_adapter(model: Any, settings: LoraSettings, *, base: str, seed: int) -> None:
    """Freeze `model` and add a new float32 adapter, which changes nothing until it is trained.

    `base` is the folder or hub name of `model`, for the files of the adapter.

    Raises:
        UsageError: A target does not exist, or is not a linear layer inside the model.
    """
    from peft import LoraConfig  # imported late, because the import takes seconds

    output = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }
    targets = sorted(set(settings.targets) or linear)
    if unknown := [target for target in targets if target not in linear]:
        raise UsageError(
            f"trainer.lora.targets: the model has no linear layer {unknown[0]!r} that can have an adapter; "
            f"it has {', '.join(sorted(linear))}"
        )
    config: Any = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number works
        target_modules=targets,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, config)


def is_adapted(model: Any) -> bool:
    """Return whether `model` has an adapter."""
    return bool(getattr(model, "peft_config", None))


def description(model: Any) -> str:
    """Return the rank and size of the adapter of `model`, for the user; empty without an adapter.

    It names the fused experts of a mixture of experts, which are not linear layers and have no adapter.
    """
    if not is_adapted(model):
        return ""
    sizes = {True: 0, False: 0}
    for name, weight in model.named_parameters():
        sizes[is_of_adapter(name)] += weight.numel()
    own, base = (f"{size / 1e6:,.3g} M" for size in (sizes[True], sizes[False]))
    places = [name.split(".") for name, _ in model.named_parameters()]
    fused = sorted({place[-1] for place in places if place[-2:-1] == ["experts"]})
    frozen = f"; the fused experts ({', '.join(fused)}) have no adapter and stay frozen" if fused else ""
    return f"LoRA rank {model.peft_config[ADAPTER].r}, {own} of {base} parameters trained{frozen}"


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights of the adapter by their names in files; the tensors are not copied."""
    return {
        _PREFIX + name.replace(f".{ADAPTER}.", "."): weight.detach()
        for name, weight in model.named_parameters()
        if is_of_adapter(name)
    }


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter of `model` into `folder`, which is created if missing.

    Raises:
        OSError, SafetensorError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = model.peft_config[ADAPTER].to_dict()
    content["target_modules"] = sorted(content["target_modules"])
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True, default=list) + "\n")
    save_file(
        {name: weight.contiguous().cpu() for name, weight in adapter_weights(model).items()}, folder / ADAPTER_WEIGHTS
    )
    share_weights(folder)


def load_adapter(model: Any, folder: Path) -> None:
    """Copy the adapter in `folder` into that of `model`. An adapter of other layers or ranks changes nothing.

    Raises:
        OSError, RuntimeError, SafetensorError: As `files.load_weights`.
    """
    fill(adapter_weights(model), [folder / ADAPTER_WEIGHTS])


@torch.no_grad()
def merge_adapter(model: Any, folder: Path) -> None:
    """Add the adapter in `folder` to the weights of `model`, which has no adapter afterwards.

    Raises:
        OSError, SafetensorError: As `files.load_weights`.
        ValueError: The adapter is not plain LoRA, or does not fit the model.
    """
    from peft import LoraConfig, PeftConfig  # imported late, because the import takes seconds

    config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{folder / ADAPTER_CONFIG}: {config.peft_type} is not supported, only LoRA")
    _inject(model, config)
    try:
        load_adapter(model, folder)
    except RuntimeError as error:
        raise ValueError(f"{folder}: the adapter does not fit its model: {error}") from None
    for name, module in list(model.named_modules()):
        if hasattr(module, "base_layer"):
            module.base_layer.weight.copy_(merged(module))
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.base_layer)
    del model.peft_config
    model.requires_grad_(True)


def _inject(model: Any, config: Any) -> None:
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    model.eval()
    for name, weight in model.named_parameters():
        weight.requires_grad_(is_of_adapter(name))
        if is_of_adapter(name):
            weight.data = weight.data.float()
