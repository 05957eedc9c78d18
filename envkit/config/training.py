"""The training file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from envkit.config import grammar
from envkit.config.grammar import Count, Exponent, Rate, Seconds, Section, Share
from envkit.config.restarts import HealthSection, RestartSection


class EnvSection(Section):
    """What is played."""

    id: str
    """Registered environment, such as Sokoban-v0."""
    num_envs: Count = 256
    """Episodes that are played at once."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, as for envkit.make."""


class SandboxSection(Section):
    """Where the environments run."""

    kind: Literal["auto", "local", "docker", "process", "none"] = "auto"
    """local: bubblewrap. docker: containers of the image envkit/games. process: a plain child process. auto: local
    where it works, otherwise process, and says so. none: in the trainer's own process."""
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
    temperature: Annotated[float, Field(gt=0), Exponent] = 1.0
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
    clip: Annotated[float, Field(gt=0, lt=1), Exponent] | None = None
    """Half-width of the trust region around ratio 1."""
    entropy_coefficient: Annotated[float, Field(ge=0), Exponent] | None = None
    """Weight of the entropy bonus."""
    kl_coefficient: Annotated[float, Field(ge=0), Exponent] | None = None
    """Weight of the KL to the policy that reinforcement started from; 0 keeps no reference."""
    value_coefficient: Annotated[float, Field(ge=0), Exponent] | None = None
    """Weight of the critic's loss (ppo)."""
    advantage_clip: Annotated[float, Field(gt=0), Exponent] | None = None
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
    learning_rate: Rate | None = None
    """AdamW's step size for the policy; none is 5e-4 for a tiny policy and 1e-6 for a pretrained model."""
    critic_learning_rate: Rate | None = None
    """The same for the critic (ppo); none is 1e-3 for a tiny policy and 1e-5 for a pretrained model."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of both learning rates; linear and cosine fall to 0 over `steps`."""
    schedule_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Train steps over which the learning rates rise to their value."""
    weight_decay: Annotated[float, Field(ge=0), Exponent] = 0.0
    """AdamW's weight decay; norms and biases have none."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products while learning; the weights stay float32. auto: float32 for a tiny policy,
    bfloat16 (autocast) for a pretrained model."""
    gradient_checkpointing: bool | None = None
    """Whether to compute activations again in the backward pass, for less memory and more time. None is false for a
    tiny policy and true for a pretrained model."""
    max_grad_norm: Annotated[float, Field(gt=0), Exponent] = 1.0
    """The gradient's norm is clipped to this."""
    micro_tokens: Count | None = None
    """Bound on the tokens of one forward and backward pass, padding included; none is 16384 for a tiny policy and 4096
    for a pretrained model."""
    checkpoint_every: Count = 10
    """Train steps between two checkpoints."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads of torch. 0 plays a tiny policy with one and learns with one a core, or with one where the load average
    at the start is above the number of cores. Repeatability to the last digit needs the same number."""


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
    """Train steps between two samples of episodes; the first and the last train step are sampled too. 0 writes none."""
    trajectories: Count = 8
    """Episodes in a sample, of as many tasks as possible."""


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
        overrides: ``"a.b=value"`` texts, the values read as YAML.

    Raises:
        ConfigError: The file cannot be read or says something that cannot be.
    """
    content = grammar.content_of(path, example="env: {id: Sokoban-v0}")
    grammar.override(content, overrides)
    return grammar.check(content, RunConfig)


def parse(content: Mapping[str, Any]) -> RunConfig:
    """Check a mapping against the grammar.

    Raises:
        ConfigError: One line for each problem, each starting with its key.
    """
    return grammar.check(content, RunConfig)


def dump(config: RunConfig) -> str:
    """Return the whole configuration as YAML, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
