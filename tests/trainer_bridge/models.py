"""Small models with distributions sharp enough to detect a wrong token or position."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from envkit.trainer_bridge.models.tiny_policy import make_policy
from envkit.types import Sample, SamplingParams, bools, floats, ints, stable_hash
from envkit.wiring.training.resolve import has_fast_bfloat16

_EPISODES = itertools.count()

WORDS = ("up", "down", "left", "right", "#", "P", "B", "T", "_", "you", "see", "a", "wall")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fast_format() -> str:
    """The number format in which a pretrained model plays and learns on this machine."""
    return "bfloat16" if has_fast_bfloat16("auto") else "float32"


def open_model(folder: Path, *, attention: str | None = None) -> Any:
    """Return a copy of the model in `folder`, which takes a fifth of the time of reading it."""
    files = tuple(sorted((str(path), path.stat().st_mtime_ns) for path in folder.iterdir()))
    return copy.deepcopy(_read(folder, files, attention))


@lru_cache(maxsize=4)
def _read(folder: Path, files: tuple[tuple[str, int], ...], attention: str | None) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


def shake(model: Any, seed: int, *, scale: float = 0.35) -> None:
    """Give the model weights under which every token of the prompt, and its place, moves the distribution a lot."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, scale, generator=generator)


def write_tiny(folder: Path, *, seed: int, hidden_size: int = 16, layers: int = 2) -> Path:
    """Write a policy in the same way as `envkit train`."""
    make_policy(folder, WORDS, hidden_size=hidden_size, layers=layers, heads=2, max_tokens=128, seed=seed)
    model = open_model(folder)
    shake(model, seed)
    model.save_pretrained(folder)
    return folder


def chat_tokenizer() -> Any:
    """A byte-level tokenizer with a few merges, and a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["user", "assistant", "answer", "you see a wall", "up down left right"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def write_chat(folder: Path, *, seed: int, max_tokens: int = 512) -> Path:
    """Write a Qwen2 with grouped key-value heads, a context of `max_tokens`, and its tokenizer."""
    tokenizer = chat_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    shake(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# --- The slow way ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def slow_logps(model: Any, prompt: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of the next token: the whole prompt alone, without a cache."""
    logits = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0, -1].double()
    logps: list[float] = torch.log_softmax(logits / temperature, dim=-1).tolist()
    return logps


def slow_pick(logps: Sequence[float], params: SamplingParams, position: int) -> int:
    """Draw a token as `SamplingParams` describes it, from lists."""
    if params.temperature == 0:
        return max(range(len(logps)), key=lambda token: logps[token])
    best_first = sorted(range(len(logps)), key=lambda token: -logps[token])
    if params.top_k:
        best_first = best_first[: params.top_k]
    kept: list[int] = []
    for token in best_first:
        if kept and math.fsum(math.exp(logps[one]) for one in kept) >= params.top_p:
            break
        kept.append(token)
    number = stable_hash(params.seed, position) / 2**64 * math.fsum(math.exp(logps[token]) for token in kept)
    for token in sorted(kept):
        number -= math.exp(logps[token])
        if number < 0:
            return token
    return max(kept)


def slow_generate(model: Any, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], list[float]]:
    """Generate one row, one token at a time, without a cache."""
    completion: list[int] = []
    logprobs: list[float] = []
    while len(completion) < params.max_tokens and not (completion and completion[-1] in params.stop):
        logps = slow_logps(model, [*prompt, *completion], params.temperature or 1.0)
        token = slow_pick(logps, params, len(completion))
        completion.append(token)
        logprobs.append(logps[token])
    return completion, logprobs


def sample(
    prompt: Sequence[int],
    *turns: tuple[Sequence[int], Sequence[int]],
    rewards: Sequence[float] | None = None,
    logprobs: Sequence[float] | None = None,
    group: str = "task",
    episode: int | None = None,
) -> Sample:
    """A sample, of a separate episode by default.

    Its turns are pairs of (completion, answer of the environment); the last answer is left out.
    """
    ids: list[int] = list(prompt)
    mask = [0] * len(ids)
    turn_ids = [0] * len(ids)
    for number, (completion, answer) in enumerate(turns):
        following = answer if number + 1 < len(turns) else ()
        ids += [*completion, *following]
        mask += [1] * len(completion) + [0] * len(following)
        turn_ids += [number] * len(completion) + [number + 1] * len(following)
    given = iter(logprobs if logprobs is not None else [-1.0] * sum(mask))
    return Sample(
        group=group,
        token_ids=ints(ids),
        mask=bools(mask),
        logprobs=floats([next(given) if own else 0.0 for own in mask]),
        turn_ids=ints(turn_ids),
        rewards=floats(rewards if rewards is not None else [0.0] * len(turns)),
        versions=ints([0 if own else -1 for own in mask]),
        episode=f"episode-{next(_EPISODES) if episode is None else episode}",
    )
