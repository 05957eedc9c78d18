"""The renderer of a model: its tokenizer and chat template with the run's settings."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from transformers import GenerationConfig

from envkit.config.parts import AutoRendererSection
from envkit.errors import UsageError
from envkit.protocols import Renderer
from envkit.trainer_bridge.render import ChatRenderer, PlainRenderer
from envkit.wiring.contexts import RendererContext

_log = logging.getLogger(__name__)


def open_renderer(context: RendererContext) -> Renderer:
    """Return a renderer with the model's chat template, or one with ``<answer>`` tags if the model has no template.

    The model's generation config may add stop tokens. Raises `UsageError` if the settings do not fit the model.
    """
    section, model = context.section, context.model
    assert isinstance(section, AutoRendererSection)
    if model is None:
        raise UsageError("renderer.kind: auto needs the tokenizer of a model; name a model, or another renderer")
    tokenizer, path = model.tokenizer, model.path
    history = None if section.history == "all" else section.history
    if tokenizer.chat_template:
        renderer = ChatRenderer(
            tokenizer,
            system=section.system,
            template=section.template,
            thinking=section.thinking,
            history=history,
            eos_ids=_eos_ids(tokenizer, path),
        )
        if renderer.reads_clock:
            _warn_of_clock(path)
        return renderer
    if section.needing_template:
        setting = section.needing_template[0].removeprefix("renderer.")
        raise UsageError(f"{path} has no chat template, which the setting {setting!r} needs; leave the setting out")
    return PlainRenderer(tokenizer, history=history, eos_ids=_eos_ids(tokenizer, path))


@cache  # once for each model
def _warn_of_clock(path: str) -> None:
    _log.warning(
        "%s: the chat template reads the clock (strftime_now), so prompts and results depend on the day; if the "
        "template takes the date as an argument, set it in renderer.template, such as {date_string: 26 Jul 2024}",
        path,
    )


def _eos_ids(tokenizer: Any, path: str) -> tuple[int, ...]:
    """Return the stop tokens of the generation config, if the model has this file, and of the tokenizer."""
    try:
        eos = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    except OSError:
        eos = None
    found = eos if isinstance(eos, (list, tuple)) else [eos]
    return tuple(dict.fromkeys(int(token) for token in (*found, tokenizer.eos_token_id) if token is not None))
