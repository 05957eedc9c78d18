"""Five chat templates that behave like those of well-known models, each with a small tokenizer that has merges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXTS = [
    "user\n\nassistant\n\nsystem\n\n\n",
    " answer left right up down  \n \n",
    "you see a wall\n####\n#P_#\n\n  left<answer>up</answer>",
    "Be brief. You are a player",
]

_SPLIT = r" ?\w+|\s*\n+|\s+(?!\S)|\s+| ?[^\s\w]+"
"""Words with the space before them, and newlines with the whitespace before them."""

_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# A system prompt of its own where the chat has none.
_QWEN25 = (
    """\
{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\nYou are a player<|im_end|>\n' }}{%- endif -%}
"""
    + _CHATML
)

# Thoughts are shown only after the last question; without thinking the prompt ends with an empty thought.
_QWEN3 = """\
{%- set place = namespace(last=0) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set place.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set text = message.content -%}
  {%- if message.role == 'assistant' and loop.index0 < place.last -%}
    {%- set text = text.split('</think>')[-1].lstrip('\n') -%}
  {%- endif -%}
  {{- '<|im_start|>' + message.role + '\n' + text + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""

# Contents are stripped.
_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
  {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + (message.content | trim) + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""

# No role for the system prompt: it is put before the last question, so it moves from turn to turn.
_MISTRAL = """\
{{- bos_token -}}
{%- set system = '' -%}
{%- set chat = messages -%}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content + '\n\n' -%}{%- set chat = messages[1:] -%}
{%- endif -%}
{%- for message in chat -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate') -}}
  {%- endif -%}
  {%- if message.role == 'user' -%}
    {{- '[INST] ' + (system if loop.index0 >= chat | length - 1 else '') + message.content + '[/INST]' -}}
  {%- else -%}
    {{- message.content + eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class Family:
    """A template, its special tokens (the first begins a text, if it is needed), and what ends texts and turns."""

    template: str
    special: Sequence[str]
    end_of_text: str
    end_of_turn: str
    plain_added: Sequence[str] = ()


FAMILIES = {
    "qwen2.5": Family(_QWEN25, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|endoftext|>", "<|im_end|>"),
    "qwen3": Family(
        _QWEN3,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "<|endoftext|>",
        "<|im_end|>",
        plain_added=["<think>", "</think>"],
    ),
    "llama3": Family(
        _LLAMA3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"],
        "<|end_of_text|>",
        "<|eot_id|>",
    ),
    "mistral": Family(_MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], "</s>", "</s>"),
    "chatml": Family(_CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|im_end|>"),
}


def tokenizer_of(name: str) -> Any:
    """Make the tokenizer of a family: byte-level, with merges over words and runs of newlines and spaces."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS * 8, trainer)
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in family.special])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in family.plain_added])
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=family.special[0],
        eos_token=family.end_of_text,
        pad_token=family.end_of_text,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = family.template
    return made
