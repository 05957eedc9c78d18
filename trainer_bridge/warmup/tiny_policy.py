"""A tiny policy, made on the spot: a causal language model from a config and a tokenizer of the environment's words.

It is saved as an ordinary Hugging Face folder, so that whatever reads a hub model reads it too. It knows nothing: it is
not Qwen2.5-0.5B, and no figure of it compares with a pretrained model's.
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
"""Tags, lower-case words, and everything else letter by letter: boards are drawn in capitals and signs."""

_SPECIAL = ("<pad>", "<s>", "<unk>")


def make_tokenizer(texts: Iterable[str], moves: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary is what stands in `texts`, in alphabetical order.

    Each of `moves` is one token, also ``turn left`` or ``B3``.
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
    """Cut out whole moves, the longest first, and then words. A move that is a word needs no rule of its own."""
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
    """Write a freshly initialised policy and its tokenizer into `folder`.

    Args:
        folder: Is made; read with ``AutoModelForCausalLM.from_pretrained``.
        texts: Everything that the environment may say and the policy may answer.
        moves: Those of them that are to be a single token each.
        hidden_size: Width.
        layers: Number of layers.
        heads: Attention heads; divides `hidden_size`.
        max_tokens: Longest episode in tokens.
        seed: Seed of the initial weights.
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
        # Short sequences of a small alphabet: positions must be told apart over a few dozen tokens, not thousands.
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
