"""Engines, trainers and models of the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from envkit.config.algorithm import AlgorithmSection
from envkit.trainer_bridge.algorithms.algorithm import Algorithm
from envkit.trainer_bridge.engines.vllm.engine import VllmEngine, VllmSettings
from envkit.trainer_bridge.engines.vllm.launch import ServerSettings, find_python
from envkit.trainer_bridge.engines.vllm.server import VllmServer
from envkit.trainer_bridge.trainers.torch_local import TorchTrainer, TrainerSettings
from envkit.types import Completion, Sample
from envkit.wiring.launch.local import LocalLauncher
from envkit.wiring.training.models import locate

SMOLLM2 = "smollm2-135m"


def model_folder() -> Path:
    """Return the folder of SmolLM2-135M-Instruct.

    Raises:
        UsageError: It is not downloaded.
    """
    return Path(locate(SMOLLM2))


def server_settings(
    model: Path, python: Path | None, *, dtype: str, max_tokens: int, lora_rank: int = 0
) -> ServerSettings:
    """Return the settings of a server; see `ServerSettings`. `python` is None for that of ``make vllm``."""
    return ServerSettings(
        python=find_python(None if python is None else str(python)),
        model=str(model),
        dtype=dtype,
        max_model_len=max_tokens,
        max_num_seqs=64,
        lora_rank=lora_rank,
    )


def vllm_engine(model: Path, python: Path | None, *, dtype: str, max_tokens: int, lora_rank: int = 0) -> VllmEngine:
    """Return an engine, whose context manager starts one server."""
    servers = server_settings(model, python, dtype=dtype, max_tokens=max_tokens, lora_rank=lora_rank)
    settings = VllmSettings(max_tokens=max_tokens, max_num_seqs=64, dtype=dtype, takes_adapters=lora_rank > 0)
    server = VllmServer(servers, launcher=LocalLauncher(), announce=print)
    return VllmEngine(settings, servers=[server], announce=print)


def trainer(
    model: Any, folder: Path | None, *, precision: str = "float32", temperature: float = 1.0, **others: Any
) -> TorchTrainer:
    """Return a trainer of `model` that publishes into `folder` and computes with one thread."""
    settings = TrainerSettings(1e-6, 1e-5, 1.0, 4096, seed=0, temperature=temperature, threads=1, precision=precision)
    grpo = Algorithm.of(AlgorithmSection.model_validate({"minibatches": 1}))
    return TorchTrainer(model, grpo, settings, folder, **others)


def load(folder: Path, dtype: str = "float32") -> Any:
    """Load the model in `folder`."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()


@torch.no_grad()
def perturb(model: Any, seed: int, *, share: float) -> None:
    """Add noise to all trained weights: normal, with `share` of their standard deviation, at least 0.02 of it."""
    draw = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            spread = max(float(weight.std()), 0.02) * share
            weight.add_(torch.empty_like(weight).normal_(0.0, spread, generator=draw))


def new_qwen2(folder: Path, *, dtype: str, **sizes: float) -> Any:
    """Write a model of the shape of Qwen2 with random weights and tied embeddings, and the tokenizer of SmolLM2.

    Args:
        folder: Where it is written.
        dtype: Number format of its file.
        sizes: Values of its configuration.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)
    config = Qwen2Config(
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, **sizes
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def chat_prompts(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of one-turn conversations."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in texts
    ]


def sample_of(prompt: Sequence[int], completion: Completion, *, episode: str, reward: float = 0.0) -> Sample:
    """Return a completion as a sample of one turn."""
    count, size = len(prompt), len(completion.token_ids)
    mask = np.arange(count + size) >= count
    versions = np.repeat(*np.array(completion.versions, dtype=np.int32).T) if completion.versions else []
    return Sample(
        group="prompts",
        token_ids=np.concatenate([np.array(prompt, dtype=np.int32), completion.token_ids]),
        mask=mask,
        logprobs=np.concatenate([np.zeros(count, dtype=np.float32), completion.logprobs]),
        turn_ids=np.zeros(count + size, dtype=np.int32),
        rewards=np.array([reward], dtype=np.float32),
        versions=np.concatenate([np.full(count, -1, dtype=np.int32), versions]),
        episode=episode,
    )
