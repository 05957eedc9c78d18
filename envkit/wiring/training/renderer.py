"""The renderer of a model: its tokenizer and chat template, under the run's settings."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from envkit.config.training import RendererSection
from envkit.errors import UsageError
from envkit.protocols import Renderer
from envkit.trainer_bridge.render import ChatRenderer, PlainRenderer


def open_tokenizer(path: str) -> Any:
    """Load the tokenizer of a model folder, or of a name of the hub whose files are in the cache.

    Raises:
        UsageError: There is none.
    """
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(f"{path}: cannot load the tokenizer: {reason}") from error


def open_renderer(tokenizer: Any, path: str, section: RendererSection) -> Renderer:
    """Return what frames the observations for a model: its chat template, or tags where it has none.

    Args:
        tokenizer: The model's tokenizer.
        path: Model folder, or a name of the hub whose files are in the cache; its generation config names stop tokens.
        section: The settings of the run.

    Raises:
        UsageError: The template refuses the settings, or there is no template for them.
    """
    history = None if section.history == "all" else section.history
    if tokenizer.chat_template:
        return ChatRenderer(
            tokenizer,
            system=section.system,
            template=section.template,
            thinking=section.thinking,
            history=history,
            eos_ids=_eos_ids(tokenizer, path),
        )
    if section.needing_template:
        raise UsageError(f"{section.needing_template[0]}: is for models with a chat template; {path} has none")
    return PlainRenderer(tokenizer, history=history, eos_ids=_eos_ids(tokenizer, path))


def _eos_ids(tokenizer: Any, path: str) -> tuple[int, ...]:
    """Return the tokens that end a model's text by its generation config, if it has such a file, and tokenizer."""
    try:
        eos = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    except OSError:
        eos = None
    found = eos if isinstance(eos, (list, tuple)) else [eos]
    return tuple(dict.fromkeys(int(token) for token in (*found, tokenizer.eos_token_id) if token is not None))
