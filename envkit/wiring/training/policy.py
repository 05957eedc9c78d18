"""The policy of a training run: an engine that generates its answers, and a trainer that updates its weights."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from safetensors import SafetensorError

from envkit.config import RunConfig
from envkit.config.training import EnvSection, RendererSection
from envkit.env import AsyncEnv
from envkit.errors import UsageError
from envkit.protocols import Renderer
from envkit.registry import EnvSpec
from envkit.trainer_bridge.algorithms.catalogue import Algorithm
from envkit.trainer_bridge.algorithms.critic import Critic
from envkit.trainer_bridge.engines.transformers import TransformersEngine, copy_to_play, open_model
from envkit.trainer_bridge.models.conversion import silence_transformers
from envkit.trainer_bridge.run_folder.writing import writing
from envkit.trainer_bridge.trainers.torch_local import TorchTrainer, TrainerSettings
from envkit.trainer_bridge.warmup.tiny_policy import make_policy
from envkit.types import Observation
from envkit.wiring import environments
from envkit.wiring.training.models import locate
from envkit.wiring.training.renderer import open_renderer
from envkit.wiring.training.resolve import is_tiny, limits_of, specs_of, task_in, trainer_defaults

_VOCABULARY_EPISODES = 64
"""Number of randomly played episodes from which the vocabulary of a tiny policy is built."""

_DEFAULT_RENDERER = RendererSection()

_HUB_TIMEOUT_S = 10.0
"""Timeout of the request that asks the hub whether it has a model."""


@dataclass(slots=True)
class Policy:
    """A model with its engine, renderer and trainer.

    Attributes:
        model: The torch model, whose weights the trainer updates.
        engine: Generates answers; during training, with its own copy of the weights.
        renderer: Turns text into tokens and back.
        tokenizer: Tokenizer of the renderer; saved with every checkpoint.
        description: One line that describes the model.
        learning_threads: Number of torch threads for training; 0 keeps torch's setting.
    """

    model: Any
    engine: TransformersEngine
    renderer: Renderer
    tokenizer: Any
    description: str
    learning_threads: int = 0
    _trainer: TorchTrainer | None = None

    @property
    def trainer(self) -> TorchTrainer:
        """The trainer, which `begin_training` creates; do not read this property before that call."""
        assert self._trainer is not None, "begin_training comes first"
        return self._trainer

    def begin_training(self, algorithm: Algorithm, run: RunConfig) -> None:
        """Create the trainer from the current weights. Add a critic and a reference model if the algorithm needs them.

        After each update, the engine copies the trained weights in memory, without a file.
        """
        tiny = is_tiny(run)
        section = trainer_defaults(run.trainer, is_tiny=tiny)
        assert section.learning_rate is not None, "trainer_defaults fills it in"
        assert section.critic_learning_rate is not None, "trainer_defaults fills it in"
        assert section.micro_tokens is not None, "trainer_defaults fills it in"
        settings = TrainerSettings(
            learning_rate=section.learning_rate,
            critic_learning_rate=section.critic_learning_rate,
            max_grad_norm=section.max_grad_norm,
            micro_tokens=section.micro_tokens,
            seed=run.seed,
            temperature=run.rollout.temperature,
            threads=self.learning_threads,
            schedule=section.schedule,
            schedule_warmup_steps=section.schedule_warmup_steps,
            steps=section.steps,
            weight_decay=section.weight_decay,
            precision=section.precision,
            gradient_checkpointing=bool(section.gradient_checkpointing),
            is_large=not tiny,
        )
        reference = copy.deepcopy(self.model).eval() if algorithm.kl_coefficient > 0 else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed)
            critic = Critic(self.model) if algorithm.has_critic else None
        self._trainer = TorchTrainer(
            self.model, algorithm, settings, None, critic=critic, reference=reference, tokenizer=self.tokenizer
        )


def open_policy(run: RunConfig) -> Policy:
    """Load the model that the training file names, or create a tiny one. The same file always gives the same policy.

    Raises:
        UsageError: The model does not exist, the disk has no space for a tiny model, or its first observation and
            answer need more than rollout.max_tokens.
    """
    silence_transformers()
    section = run.engine
    load = partial(
        load_policy,
        device=device_of(section.device),
        dtype=section.dtype,
        batch_tokens=section.batch_tokens,
        threads=playing_threads(run),
        renderer=run.renderer,
    )
    if section.model is not None:
        policy = load(locate(section.model))
        policy.description = f"{'tiny policy,' if is_tiny(run) else 'pretrained'} {policy.description}"
        return policy
    texts = _collect_texts(run)
    with TemporaryDirectory(prefix="envkit-") as folder, writing(Path(folder)):
        make_policy(
            Path(folder),
            texts.observations,
            moves=texts.moves,
            hidden_size=section.hidden_size,
            layers=section.layers,
            heads=section.heads,
            max_tokens=run.rollout.max_tokens,
            seed=run.seed,
        )
        policy = load(folder)
    policy.description = f"tiny policy, {policy.description}"
    longest, env_id = max((len(policy.renderer.open(Observation(text))), env_id) for env_id, text in texts.openings)
    needed = longest + limits_of(run).turn_tokens
    if needed > run.rollout.max_tokens:
        raise UsageError(
            f"rollout.max_tokens: {run.rollout.max_tokens} is too small for the first observation of {env_id} and "
            f"the answer to it; use at least {needed}"
        )
    return policy


def playing_threads(run: RunConfig) -> int:
    """Return the number of torch threads that generate answers; 0 keeps torch's setting.

    The default for a tiny policy is one thread, because its matrices are small: on idle cores a second thread gains
    nothing, and on busy cores every forward pass waits for the second thread.
    """
    return run.trainer.threads or (1 if is_tiny(run) else 0)


def load_policy(
    path: str,
    *,
    device: str,
    dtype: str = "float32",
    batch_tokens: int = 65536,
    threads: int = 0,
    renderer: RendererSection = _DEFAULT_RENDERER,
    is_trained: bool = True,
) -> Policy:
    """Load a model folder or a hub model.

    The engine uses weights of type `dtype`. If `is_trained`, the policy also has float32 weights for the trainer.
    `threads` is the number of torch threads for the engine; 0 keeps torch's setting.

    Raises:
        UsageError: The model or its tokenizer does not exist, or the chat template rejects the settings of `renderer`.
    """
    silence_transformers()
    is_folder = Path(path).is_dir()
    is_local = is_folder or not _hub_has(path)
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=is_local)
        model = open_model(path, device=device, is_local=is_local, dtype="float32" if is_trained else dtype)
    except (OSError, ValueError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if is_local and not is_folder:
            reason = "no such folder or cached model, and the hub lacks it or is unreachable; name a model folder"
        raise UsageError(f"cannot load {path}: {reason}") from error
    playing, source = (copy_to_play(model, dtype), model) if is_trained else (model, None)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    engine = TransformersEngine(playing, pad_id=pad_id, batch_tokens=batch_tokens, threads=threads, source=source)
    count = sum(weight.numel() for weight in model.parameters())
    kind = type(model).__name__
    framing = open_renderer(tokenizer, path, renderer)
    return Policy(model, engine, framing, tokenizer, f"{kind} with {count:,} parameters on {device}")


def device_of(device: str) -> str:
    """Return `device`, or for ``"auto"`` the device to use: ``"cuda"`` if torch finds a GPU, otherwise ``"cpu"``.

    Raises:
        UsageError: `device` is ``"cuda"``, but torch finds no GPU.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch finds no GPU on this machine; use device auto or cpu")
    return device


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts of the environments, collected in episodes with random moves.

    Attributes:
        openings: The id of the environment and the first observation of each episode.
        observations: All observations.
        moves: All legal moves.
    """

    openings: list[tuple[str, str]]
    observations: list[str]
    moves: set[str]


def _collect_texts(run: RunConfig) -> _Texts:
    """Play episodes with random moves in every environment and collect their texts."""
    rng = random.Random(run.seed)
    texts = _Texts([], [], set())
    for section, spec in zip(run.envs, specs_of(run), strict=True):
        _collect_section(section, spec, run.seed, rng, texts)
    return texts


def _collect_section(section: EnvSection, spec: EnvSpec, seed: int, rng: random.Random, texts: _Texts) -> None:
    """Add the texts of one environment to `texts`."""
    env = environments.open_env(section.id, **section.options)
    if isinstance(env, AsyncEnv):
        raise UsageError(f"engine.model: a tiny policy cannot play {section.id}; name a model")
    for number in range(_VOCABULARY_EPISODES):
        task = task_in(section, spec, "train", seed, number)
        with environments.attributed(section.id, "reset"):
            text, info = env.reset(seed=task.seed, options=dict(task.options))
        moves = [str(move) for move in info.get("legal_moves", ())]
        texts.openings.append((section.id, text))
        texts.observations.append(text)
        texts.moves.update(moves)
        ended = not moves
        while not ended:
            with environments.attributed(section.id, "step"):
                text, _, terminated, truncated, info = env.step(f"<answer>{rng.choice(moves)}</answer>")
            texts.observations.append(text)
            moves = [str(move) for move in info.get("legal_moves", moves)]
            texts.moves.update(moves)
            ended = terminated or truncated or not moves
    env.close()


def _hub_has(name: str) -> bool:
    """Whether the hub answers and has the model. Ask before loading: transformers retries for almost a minute."""
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    # Catch every error, because the classes depend on the version of huggingface_hub. The caller then reads the cache.
    except Exception:
        return False
    return True
