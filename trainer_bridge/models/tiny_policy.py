"""Creation of a tiny policy: a small causal language model, and a tokenizer with the environment's vocabulary.

The policy is saved as an ordinary Hugging Face model folder, which tools for hub models can read. Its initial weights
are random, so its results are not comparable with those of a pretrained model such as Qwen2.5-0.5B.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..render import ANSWER_CLOSE, ANSWER_OPEN

_WORDS = r"</?[a-z]+>|[a-z]+|\n|."
"""Splits text into tags, lower-case words, and single characters, since boards consist of capitals and signs."""

_SPECIAL = ("<pad>", "<s>", "<unk>")


def make_tokenizer(texts: Iterable[str], moves: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary is special tokens, answer tags, and the sorted words of `texts` and `moves`.

    Each of `moves` becomes a single token, even if it consists of several words, such as ``turn left`` or ``B3``.
    """
    whole = set(moves)
    split = _splitting_rule(whole)
    words = {word for text in [*texts, *whole] for word, _ in split.pre_tokenize_str(text)}
    tags = [ANSWER_OPEN, ANSWER_CLOSE, "\n"]
    vocabulary = [*_SPECIAL, *tags, *sorted(words - {*_SPECIAL, *tags})]
    model = models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def _splitting_rule(moves: set[str]) -> Any:
    """Return a pre-tokenizer that splits text into moves and, between them, into words. Longer moves match first."""
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    long = sorted(
        (move for move in moves if len(words.pre_tokenize_str(move)) > 1), key=lambda move: (-len(move), move)
    )
    if not long:
        return words
    return pre_tokenizers.Split(Regex("|".join([*map(re.escape, long), _WORDS])), behavior="isolated")


def make_policy(
    folder: Path,
    texts: Iterable[str],
    *,
    moves: Iterable[str] = (),
    hidden_size: int,
    layers: int,
    heads: int,
    max_tokens: int,
    seed: int,
) -> None:
    """Write a freshly initialised policy and its tokenizer into `folder`, which is created if missing.

    The vocabulary is that of `make_tokenizer`, for all possible observations, answers and moves. `heads` must divide
    `hidden_size`, and `max_tokens` is the maximum length of an episode.
    """
    tokenizer = make_tokenizer(texts, moves)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max(max_tokens, 64),
        # Use a small RoPE base: sequences are short, so positions must differ clearly over dozens of tokens.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        bos_token_id=_SPECIAL.index("<s>"),
        eos_token_id=None,
        pad_token_id=_SPECIAL.index("<pad>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
