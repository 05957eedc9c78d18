"""Chat templates with tools that behave like those of well-known models, for the tokenizers of `templates`."""

from __future__ import annotations

from typing import Any

from tests.trainer_bridge.render.templates import FAMILIES, tokenizer_of

# The tools are in the system prompt, and results are user turns with a tag of their own.
_HERMES = """\
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\n\n' -}}{%- endif -%}
  {{- '# Tools\n' -}}
  {%- for tool in tools -%}{{- (tool | tojson) + '\n' -}}{%- endfor -%}
  {{- 'Answer with <tool_call></tool_call>.<|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' + message.content -}}
    {%- for call in message.tool_calls -%}
      CALL
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif message.role == 'user' -%}
    {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

_JSON_CALL = """\
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' -}}
"""

_XML_CALL = """\
{{- '<tool_call>\n<function=' + call.function.name + '>\n' -}}
{%- for name, value in call.function.arguments.items() -%}
  {{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' -}}
{%- endfor -%}
{{- '</function>\n</tool_call>' -}}
"""

_PAIRS_CALL = """\
{{- '<tool_call>' + call.function.name + '\n' -}}
{%- for name, value in call.function.arguments.items() -%}
  {{- '<arg_key>' + name + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) -}}
  {{- '</arg_value>\n' -}}
{%- endfor -%}
{{- '</tool_call>' -}}
"""

_GEMMA_CALL = """\
{{- '<|tool_call>call:' + call.function.name + '{' -}}
{%- for name, value in call.function.arguments | dictsort -%}
  {{- ('' if loop.first else ',') + name + ':' -}}
  {{- '<|"|>' + value + '<|"|>' if value is string else value | tojson -}}
{%- endfor -%}
{{- '}<tool_call|>' -}}
"""

_DEEPSEEK_CALL = """\
{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' -}}
{{- (call.function.arguments | tojson) + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' -}}
"""

UNREAD_CALLS = {
    "lfm2": "{{- '<|tool_call_start|>[' + call.function.name + (call.function.arguments | string) + ']' -}}",
}
"""How templates write calls in markups that envkit does not read."""

# Results have a role of their own and are JSON texts; the tools are in the first message of the user.
_LLAMA3 = """\
{{- bos_token -}}
{%- set place = namespace(first=true) -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' -}}
    {%- if tools and message.role == 'user' and place.first -%}
      {%- set place.first = false -%}
      {%- for tool in tools -%}{{- (tool | tojson(indent=2)) + '\n\n' -}}{%- endfor -%}
    {%- endif -%}
    {%- if message.tool_calls -%}
      {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' -}}
      {{- (message.tool_calls[0].function.arguments | tojson) + '}' -}}
    {%- else -%}
      {{- message.content | trim -}}
    {%- endif -%}
    {{- '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""

# Calls and results do not count in the alternation of roles, and the tools are before the last message of the user.
_MISTRAL = """\
{{- bos_token -}}
{%- set count = namespace(turns=0, last=0) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set count.last = loop.index0 -%}{%- endif -%}
  {%- if message.role in ('user', 'assistant') and not message.tool_calls -%}
    {%- if (message.role == 'user') != (count.turns % 2 == 0) -%}
      {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
    {%- set count.turns = count.turns + 1 -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if tools and loop.index0 == count.last -%}
      {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '[INST] ' + message.content + '[/INST]' -}}
  {%- elif message.tool_calls -%}
    {%- set call = message.tool_calls[0] -%}
    {{- '[TOOL_CALLS] [' + (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}]' + eos_token -}}
  {%- elif message.role == 'assistant' -%}
    {{- ' ' + (message.content | trim) + eos_token -}}
  {%- elif message.role == 'tool' -%}
    {%- if message.tool_call_id | length != 9 -%}{{- raise_exception('an id has 9 characters') -}}{%- endif -%}
    {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id -}}
    {{- '"}[/TOOL_RESULTS]' -}}
  {%- else -%}
    {{- raise_exception('no such role') -}}
  {%- endif -%}
{%- endfor -%}
"""

TOOL_TEMPLATES = {
    "hermes": ("qwen2.5", _HERMES.replace("CALL", _JSON_CALL), ["<tool_call>", "</tool_call>"]),
    "coder": ("qwen2.5", _HERMES.replace("CALL", _XML_CALL), []),
    "glm": ("qwen2.5", _HERMES.replace("CALL", _PAIRS_CALL), ["<tool_call>", "</tool_call>"]),
    "gemma4": ("qwen2.5", _HERMES.replace("CALL", _GEMMA_CALL), ["<|tool_call>", "<tool_call|>", '<|"|>']),
    "deepseek": ("qwen2.5", _HERMES.replace("CALL", _DEEPSEEK_CALL), ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"]),
    "llama3": ("llama3", _LLAMA3, ["<|python_tag|>"]),
    "mistral": ("mistral", _MISTRAL, ["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"]),
    "chatml": ("chatml", FAMILIES["chatml"].template, []),
}
"""Templates by name, each with the family of its tokenizer and more special tokens."""


def unread_tokenizer(name: str) -> Any:
    """Make a tokenizer whose template writes calls as `UNREAD_CALLS` says."""
    tokenizer = tool_tokenizer("hermes")
    tokenizer.chat_template = _HERMES.replace("CALL", UNREAD_CALLS[name])
    return tokenizer


def tool_tokenizer(name: str) -> Any:
    family, template, special = TOOL_TEMPLATES[name]
    tokenizer = tokenizer_of(family)
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer
