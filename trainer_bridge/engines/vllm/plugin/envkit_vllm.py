"""vLLM plug-in: the weight transfer backend ``envkit_file``, which loads new weights from safetensors files.

It is imported only in vLLM's processes, which find it by PYTHONPATH and by the entry point in the folder beside it. The
names and shapes of all tensors are checked before the first weight is replaced: after a rejected update, the server
still samples with its old weights. After any later failure, such as an unreadable disk, the server must be restarted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

BACKEND = "envkit_file"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_NAMED = 3
"""Number of tensors that an error names."""

Shapes = dict[str, tuple[int, ...]]


@dataclass
class FileInit(base.WeightTransferInitInfo):
    """The backend needs no connection."""


@dataclass
class FileUpdate(base.WeightTransferUpdateInfo):
    """An update: a safetensors file, or a folder with one (``model.safetensors``) or with several and their index.

    The tensors have the names of the model's own checkpoint.
    """

    path: str


class FileEngine(base.WeightTransferEngine[FileInit, FileUpdate]):
    """Loads all weights in `receive_weights`; the calls before and after it do nothing."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    _expected: Shapes | None = None

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Do nothing: preparing the model here would leave it without weights if the update is rejected."""

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Replace all weights.

        Raises:
            ValueError: The tensors differ from those of the model. The old weights are still in place.
        """
        files = _files(Path(update_info.path))
        shapes = _shapes(files)
        if self._expected is None:
            self._expected = self._own_shapes() or shapes
        _check(shapes, self._expected, is_tied=bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False)))
        if current_platform.is_cpu():
            self._forget_kernels_of_experts()
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_tensors(files))
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            self._pack_heads_again()

    def _own_shapes(self) -> Shapes | None:
        """Return the shapes in the model's own checkpoint; None if its folder is not known or has another format."""
        try:
            return _shapes(_files(_folder(self.model_config.model, self.model_config.revision)))
        except (OSError, ValueError):
            return None

    def _forget_kernels_of_experts(self) -> None:
        """Let vLLM pack new weights of experts, too: on a CPU, it packs only those for a new kernel."""
        for module in self.model.modules():
            if getattr(module, "moe_kernel", None) is not None:
                module.moe_kernel = None

    def _pack_heads_again(self) -> None:
        """Renew the packed copy of tied output embeddings, which vLLM forgets when it reloads weights on a CPU."""
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def register() -> None:
    """Make the backend known to vLLM, which calls this in each of its processes, and may call it again."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)


def _folder(model: str, revision: str | None) -> Path:
    """Return the folder of `model`: a path, or a name of the Hugging Face hub that vLLM has downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(found, str):
        raise ValueError(f"{model} is not on this machine")
    return Path(found).parent


def _files(path: Path) -> list[Path]:
    """Return the safetensors files of `path`, in order."""
    if path.is_file():
        return [path]
    if (index := path / _INDEX).is_file():
        shards: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [path / name for name in sorted(set(shards.values()))]
    if (single := path / _SINGLE).is_file():
        return [single]
    raise ValueError(f"no weights at {path}: neither a safetensors file nor a folder with {_SINGLE} or {_INDEX}")


def _shapes(files: list[Path]) -> Shapes:
    """Return the shape of each tensor, from the headers of the files.

    Raises:
        ValueError: A file is missing or damaged.
    """
    shapes: Shapes = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as content:
                shapes |= {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors has an exception class of its own for damaged files
            raise ValueError(f"cannot read {file}: {error}") from None
    return shapes


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(str(file), framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                yield name, content.get_tensor(name)


def _check(found: Shapes, expected: Shapes, *, is_tied: bool) -> None:
    """Check names and shapes. Tied output embeddings and constants may be left out.

    Raises:
        ValueError: Names or shapes differ. The message names the first tensors that do.
    """

    def is_needed(name: str) -> bool:
        return not name.endswith(".rotary_emb.inv_freq") and not (is_tied and name.endswith("lm_head.weight"))

    parts = [
        ("missing", [name for name in expected if name not in found and is_needed(name)]),
        ("unknown", [name for name in found if name not in expected and is_needed(name)]),
        (
            "of another shape",
            [
                f"{name} {list(shape)} instead of {list(expected[name])}"
                for name, shape in found.items()
                if name in expected and shape != expected[name]
            ],
        ),
    ]
    problems = [f"{len(names)} {what} ({', '.join(sorted(names)[:_MAX_NAMED])})" for what, names in parts if names]
    if problems:
        raise ValueError(f"these weights do not belong to the model; tensors: {'; '.join(problems)}")
