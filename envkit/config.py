"""The grammar of a training file: frozen sections that forbid unknown keys, with units in the names.

There is no interpolation, no inheritance, no class path and no environment variable. `load` reads a file, `parse` a
mapping; both report every problem at once, one line each, starting with the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from envkit.errors import ConfigError, did_you_mean
from envkit.types import JSON

_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")


def _number(value: Any) -> Any:
    """Read ``1e-6`` as the number that it is: to YAML, one with an exponent but no point is a text."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


_Exponent = BeforeValidator(_number)
Share = Annotated[float, Field(ge=0, le=1), _Exponent]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0), _Exponent]
Rate = Annotated[float, Field(gt=0), _Exponent]


class Section(BaseModel):
    """A part of the file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class EnvSection(Section):
    """What is played."""

    id: str
    """Registered environment, such as Sokoban-v0."""
    num_envs: Count = 256
    """Episodes that are played at once."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, as for envkit.make."""


class HealthSection(Section):
    """When a sandbox counts as lost."""

    interval_s: Seconds = 5.0
    """Seconds between two probes."""
    timeout_s: Seconds = 2.0
    """Seconds until a probe counts as missed."""
    misses: Count = 3
    """Missed probes in a row until the sandbox is lost."""


class RestartSection(Section):
    """How often a lost sandbox is replaced."""

    budget: Count = 5
    """Replacements within one window, after which the run gives up."""
    window_s: Seconds = 600.0
    """Length of the window in seconds."""


class SandboxSection(Section):
    """Where the environments run."""

    kind: Literal["auto", "local", "process", "none"] = "auto"
    """local: bubblewrap. process: a plain child process. auto: local where it works, otherwise process, and says so.
    none: in the trainer's own process."""
    boxes: Count = 1
    """Number of sandboxes; the episodes are spread over them."""
    health: HealthSection = HealthSection()
    restarts: RestartSection = RestartSection()


class TransformersEngineSection(Section):
    """A Hugging Face causal language model in this process."""

    kind: Literal["transformers"] = "transformers"
    model: str | None = None
    """Folder or hub name of a model; none makes a tiny policy on the spot, which reads the environment's words."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights that play; those that learn are float32, and rounded when they are handed over."""
    hidden_size: Annotated[int, Field(ge=8, multiple_of=2)] = 64
    """Width of the tiny policy."""
    layers: Count = 3
    """Layers of the tiny policy."""
    heads: Count = 4
    """Attention heads of the tiny policy; divides hidden_size."""
    batch_tokens: Count = 65536
    """Bound on the tokens of one forward pass, padding included."""


class RolloutSection(Section):
    """How episodes are played."""

    group_size: Count = 8
    """Episodes of the same task, which are compared with each other."""
    max_turns: Count = 16
    """Turns after which an episode is cut off."""
    max_tokens: Count = 2048
    """Tokens of a whole episode after which it is cut off."""
    turn_tokens: Count | None = None
    """Bound on one completion; none is 1 for the tiny policy (a move is a word) and 128 for others."""
    timeout_s: Seconds = 60.0
    """Seconds until a reset or step counts as hung; the episode is then void."""
    temperature: Annotated[float, Field(gt=0), _Exponent] = 1.0
    """Sampling temperature, in training and in sampled evaluation."""
    retries: Annotated[int, Field(ge=0)] = 3
    """How often a void episode (lost sandbox, hung step) is played again."""


class AlgorithmSection(Section):
    """How episodes become a gradient. A key that is none takes the preset's value."""

    preset: str = "grpo"
    """grpo, reinforce or ppo."""
    advantage: str | None = None
    """group_normalised, batch_normalised or gae."""
    loss: str | None = None
    """clipped or reinforce."""
    gamma: Share | None = None
    """Discount a turn."""
    gae_lambda: Share | None = None
    """Weight of longer estimates (ppo)."""
    clip: Annotated[float, Field(gt=0, lt=1), _Exponent] | None = None
    """Half-width of the trust region around ratio 1."""
    entropy_coefficient: Annotated[float, Field(ge=0), _Exponent] | None = None
    """Weight of the entropy bonus."""
    kl_coefficient: Annotated[float, Field(ge=0), _Exponent] | None = None
    """Weight of the KL to the policy that reinforcement started from; 0 keeps no reference."""
    value_coefficient: Annotated[float, Field(ge=0), _Exponent] | None = None
    """Weight of the critic's loss (ppo)."""
    advantage_clip: Annotated[float, Field(gt=0), _Exponent] | None = None
    """Bound on the size of an advantage; none does not bound it."""
    epochs: Count | None = None
    """Passes over the samples of one train step."""
    minibatches: Count | None = None
    """Optimiser updates a pass."""


class TorchTrainerSection(Section):
    """One process, one device."""

    kind: Literal["torch_local"] = "torch_local"
    steps: Annotated[int, Field(ge=0)] = 100
    """Train steps; each plays groups_per_step groups and learns from them. 0 stops after the warm-up."""
    groups_per_step: Count = 32
    """Tasks a train step."""
    learning_rate: Rate = 5e-4
    """AdamW's step size for the policy; about 1e-6 for a pretrained model."""
    critic_learning_rate: Rate = 1e-3
    """The same for the critic (ppo)."""
    max_grad_norm: Annotated[float, Field(gt=0), _Exponent] = 1.0
    """The gradient's norm is clipped to this."""
    micro_tokens: Count = 16384
    """Bound on the tokens of one forward and backward pass, padding included."""
    checkpoint_every: Count = 10
    """Train steps between two checkpoints."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads of torch; 0 takes one a core. Repeatability to the last digit needs the same number."""


class EvaluationSection(Section):
    """How success is measured, on levels that are in no training set."""

    episodes: Annotated[int, Field(ge=0)] = 512
    """Held-out tasks, each played once sampled and once greedily; 0 does not evaluate."""
    every: Count = 10
    """Train steps between two evaluations; there is always one before and one after."""
    seed: Annotated[int, Field(ge=0)] = 1_000_003
    """Seed of the held-out tasks, the same for every run seed, so that runs compare."""


class WarmupSection(Section):
    """Imitation of the environment's own solver before reinforcement; for policies made from nothing."""

    kind: Literal["auto", "demonstrations", "none"] = "auto"
    """auto takes demonstrations for a tiny policy and none for a model that can already read and write."""
    lesson_states: Count = 30_000
    """Different single states that lessons are drawn from."""
    tricky_share: Share = 0.5
    """Share of lessons in states where a careless player goes wrong."""
    lesson_noise: Share = 0.5
    """Share of lessons that show a random move instead of a good one."""
    lesson_batch: Count = 256
    """Lessons an update."""
    lesson_updates: Annotated[int, Field(ge=0)] = 250
    """Updates with one state a sequence."""
    strung_lessons: Count = 4
    """States a sequence in the second stage, each with its own answer: the newest one is what counts."""
    strung_updates: Annotated[int, Field(ge=0)] = 300
    """Updates of the second stage."""
    episode_noise: Share = 0.65
    """Share of random moves in whole demonstrated episodes, which come last."""
    episode_batch: Count = 64
    """Episodes an update."""
    episode_updates: Annotated[int, Field(ge=0)] = 50
    """Bound on the updates of the last stage."""
    learning_rate: Rate = 4e-3
    """Step size of Muon and AdamW in lessons; falls as a cosine."""
    episode_learning_rate: Rate = 2e-3
    """The same in whole episodes."""
    greedy_goal: Share = 0.95
    """The last stage ends as soon as greedy play succeeds this often on validation levels."""
    check_every: Count = 25
    """Updates between two looks at validation levels."""
    check_episodes: Count = 256
    """Validation levels a look."""


class TrackingSection(Section):
    """What is written beside the checkpoints."""

    tensorboard: bool = True
    """Whether to write event files for TensorBoard."""
    trajectories_every: Annotated[int, Field(ge=0)] = 10
    """Train steps between two samples of trajectories; 0 writes none."""
    trajectories: Count = 8
    """Episodes a sample."""


class RunConfig(Section):
    """A training file."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 7
    """Everything that is drawn at random follows from this and the rest of the file."""
    env: EnvSection
    sandbox: SandboxSection = SandboxSection()
    engine: TransformersEngineSection = TransformersEngineSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TorchTrainerSection = TorchTrainerSection()
    evaluation: EvaluationSection = EvaluationSection()
    warmup: WarmupSection = WarmupSection()
    tracking: TrackingSection = TrackingSection()


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a training file.

    Args:
        path: A YAML file.
        overrides: ``"a.b=value"`` texts, the value read as YAML.

    Raises:
        ConfigError: The file cannot be read or says something that cannot be.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"{path}: must hold keys and values, such as 'env: {{id: Sokoban-v0}}'"])
    for override in overrides:
        _override(content, override)
    return parse(content)


def parse(content: Mapping[str, Any]) -> RunConfig:
    """Check a mapping against the grammar.

    Raises:
        ConfigError: One line for each problem, each starting with its key.
    """
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_line(problem) for problem in error.errors()) from None


def dump(config: RunConfig) -> str:
    """Return the whole configuration as YAML, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _override(content: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError([f"{override}: must read key=value, such as trainer.steps=10"])
    *parents, last = key.split(".")
    place = content
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError([f"{key}: {parent} is a value and has no keys"])
        place = inner
    try:
        place[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError([f"{key}: {value!r} is not YAML"]) from None


def _line(problem: Any) -> str:
    location: tuple[str | int, ...] = problem["loc"]
    key = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return f"{key}: no such key{did_you_mean(str(location[-1]), _keys(location[:-1]))}"
    value: JSON = problem.get("input")
    shown = f", got {value!r}" if isinstance(value, (str, int, float, bool)) else ""
    return f"{key}: {problem['msg']}{shown}"


def _keys(location: Sequence[str | int]) -> list[str]:
    """Return the keys that exist in the section at `location`."""
    section: type[BaseModel] = RunConfig
    for part in location:
        inner = section.model_fields[str(part)].annotation if str(part) in section.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        section = inner
    return list(section.model_fields)
