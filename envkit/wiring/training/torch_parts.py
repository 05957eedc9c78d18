"""The built-in parts that need torch: tiny policies, the renderer, and the engine and trainer of this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi

from envkit.config import RunConfig
from envkit.config.parts import AutoRendererSection, TorchTrainerSection, TransformersEngineSection
from envkit.errors import EnvkitError, UsageError
from envkit.protocols import Renderer
from envkit.runs.files import writing
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.models.conversion import silence_transformers
from envkit.trainer_bridge.models.saved_policy import base_of
from envkit.trainer_bridge.models.tiny_policy import make_policy
from envkit.trainer_bridge.render import ChatRenderer, PlainRenderer
from envkit.trainer_bridge.trainers.torch_local import TorchTrainer, TrainerSettings
from envkit.trainer_bridge.weights.lora import LoraSettings, add_adapter, merge_adapter
from envkit.types import Observation, Place
from envkit.wiring.contexts import EngineContext, Model, PolicyKind, RendererContext, TrainerContext
from envkit.wiring.training.models import locate
from envkit.wiring.training.resolve import filled, limits_of
from envkit.wiring.training.vocabulary import collect_texts

_log = logging.getLogger(__name__)

_HUB_TIMEOUT_S = 10.0
"""Timeout of the request that asks the hub whether it has a model."""


def find_model(path: str, kind: PolicyKind = "pretrained") -> Model:
    """Return the model in a folder or on the hub, with its tokenizer. Raises `UsageError` if it cannot be read."""
    silence_transformers()
    is_local = Path(path).is_dir() or not _hub_has(path)
    with _loading(path, is_local=is_local):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=is_local)
    return Model(path, tokenizer, kind, is_local)


def new_tiny_policy(run: RunConfig, section: TransformersEngineSection, folder: Path) -> Model:
    """Create a tiny policy in the existing `folder`. The same training file always gives the same policy.

    Raises:
        UsageError: The disk has no space, or the first observation and answer need more than rollout.max_tokens.
    """
    silence_transformers()
    texts = collect_texts(run)
    with writing(folder):
        make_policy(
            folder,
            texts.observations,
            moves=texts.moves,
            hidden_size=section.hidden_size,
            layers=section.layers,
            heads=section.heads,
            max_tokens=run.rollout.max_tokens,
            seed=run.seed,
        )
    model = find_model(str(folder), "tiny")
    renderer = open_renderer(RendererContext(section=run.renderer, model=model))
    longest, env_id = max((len(renderer.open(Observation(text))), env_id) for env_id, text in texts.openings)
    needed = longest + limits_of(run.rollout).turn_tokens
    if needed > run.rollout.max_tokens:
        raise UsageError(
            f"rollout.max_tokens: {run.rollout.max_tokens} is too small for the first observation of {env_id} and "
            f"the answer to it; use at least {needed}"
        )
    return model


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
        eos = transformers.GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    except OSError:
        eos = None
    found = eos if isinstance(eos, (list, tuple)) else [eos]
    return tuple(dict.fromkeys(int(token) for token in (*found, tokenizer.eos_token_id) if token is not None))


def open_transformers(context: EngineContext) -> TransformersEngine:
    """Load the model into an engine; see `TransformersEngineSection`."""
    section, model = context.section, context.model
    assert isinstance(section, TransformersEngineSection)
    assert model is not None, "without engine.model, a tiny policy is created"
    playing = _load(model, device=device_of(section.device, context.places[:1]), dtype=section.dtype)
    pad_id = model.tokenizer.pad_token_id if model.tokenizer.pad_token_id is not None else 0
    return TransformersEngine(playing, pad_id=pad_id, threads=context.threads)


def open_torch_local(context: TrainerContext) -> TorchTrainer:
    """Load the model into a trainer; see `TorchTrainerSection`.

    The engine ``transformers`` copies the weights within this process; any other engine gets them in files.
    """
    model, engine = context.model, context.engine
    assert isinstance(context.section, TorchTrainerSection)
    if model is None:
        raise UsageError("trainer.kind: torch_local trains a model, and engine.model names none; name one")
    section = context.section
    settings = TrainerSettings(
        learning_rate=filled(section.learning_rate),
        critic_learning_rate=filled(section.critic_learning_rate),
        max_grad_norm=section.max_grad_norm,
        micro_tokens=filled(section.micro_tokens),
        seed=context.seed,
        temperature=context.temperature,
        threads=context.threads,
        schedule=section.schedule,
        schedule_warmup_steps=section.schedule_warmup_steps,
        steps=section.steps,
        weight_decay=section.weight_decay,
        precision=section.precision,
        gradient_checkpointing=bool(section.gradient_checkpointing),
        packing=section.packing,
        imitation_rate=context.imitation_rate,
        imitates_with_muon=model.kind == "tiny",
    )
    lora = section.lora
    device = device_of(section.device, [context.place])
    learning = _load(model, device=device, dtype="float32" if lora is None else section.precision)
    if lora is not None:
        targets = () if lora.targets == "all-linear" else tuple(lora.targets)
        base = str(Path(model.path).resolve()) if Path(model.path).is_dir() else model.path
        add_adapter(learning, LoraSettings(lora.rank, lora.alpha, targets), base=base, seed=context.seed)
    trainer = TorchTrainer(
        learning,
        context.algorithm,
        settings,
        None if isinstance(engine, TransformersEngine) else context.folder,
        engine_dtype=getattr(engine, "dtype", "float32"),
        tokenizer=model.tokenizer,
        publishes_adapter=lora is not None and getattr(engine, "takes_adapters", False),
        teacher=_teacher(context, model),
    )
    if isinstance(engine, TransformersEngine):
        engine.copy_from(trainer.copy_to)
    return trainer


def _teacher(context: TrainerContext, model: Model) -> Any:
    """Load the model that ``algorithm.reference`` names, if any; its tokens must be those of `model`."""
    name = context.algorithm.section.reference
    if name is None or not context.algorithm.needs_reference:
        return None
    teacher = find_model(locate(name))
    if teacher.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise UsageError(
            f"algorithm.reference: the tokens of {name} are not those of {model.path}; "
            "name a model with the same tokenizer"
        )
    section = context.section
    assert isinstance(section, TorchTrainerSection)
    return _load(teacher, device=device_of(section.device, [context.place]), dtype=section.precision)


def device_of(device: str, places: Sequence[Place] = ()) -> str:
    """Return `device`, or for ``"auto"`` the device to use: ``"cuda"`` if torch finds a GPU, otherwise ``"cpu"``.

    If the first of `places` has a GPU other than the first one, it is named, as in ``"cuda:1"``.

    Raises:
        UsageError: `device` is ``"cuda"``, but torch finds no GPU.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch finds no GPU on this machine; use device auto or cpu")
    gpu = next((gpu for place in places for gpu in place.gpus or ()), 0)
    return f"cuda:{gpu}" if device == "cuda" and gpu else device


def _load(model: Model, *, device: str, dtype: str = "float32") -> Any:
    """Load a causal language model. Trained weights need float32, since bfloat16 would round updates of 1e-6 to zero.

    For a folder with an adapter, load the model to which it belongs, and add the adapter to the weights.
    """
    folder = Path(model.path)
    if (base := base_of(folder)) is not None:
        is_local = Path(base).is_dir() or not _hub_has(base)
        loaded: Any = _load(Model(base, model.tokenizer, is_local=is_local), device=device, dtype=dtype)
        with _loading(model.path, is_local=True):
            merge_adapter(loaded, folder)
        return loaded
    with _loading(model.path, is_local=model.is_local):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model.path, dtype=getattr(torch, dtype), local_files_only=model.is_local
        )
        return loaded.to(device).eval()


@contextmanager
def _loading(path: str, *, is_local: bool) -> Iterator[None]:
    """Convert an error while a model or tokenizer is loaded to a `UsageError` of one line."""
    try:
        yield
    except (EnvkitError, ImportError):
        raise
    except Exception as error:  # damaged files raise errors of many classes
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if is_local and not Path(path).is_dir():
            reason = "no such folder or cached model, and the hub lacks it or is unreachable; "
            reason += "name a model folder, or one of `envkit model list`"
        raise UsageError(f"cannot load {path}: {reason}") from error


def _hub_has(name: str) -> bool:
    """Whether the hub answers and has the model. Ask before loading: transformers retries for almost a minute."""
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    # Catch every error, because the classes depend on the version of huggingface_hub. The caller then reads the cache.
    except Exception:
        return False
    return True
