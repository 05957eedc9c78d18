"""The training file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator

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
    count: Count = 1
    """Number of sandboxes; the episodes are spread over them."""
    health: HealthSection = HealthSection()
    restarts: RestartSection = RestartSection()


class TransformersEngineSection(Section):
    """A Hugging Face causal language model in this process."""

    kind: Literal["transformers"] = "transformers"
    model: str | None = None
    """Name of the catalogue (`envkit model list`), GGUF file, model folder or hub name; null makes a tiny policy on the
    spot, which reads the environment's words. A policy folder that envkit saved says whether it is tiny."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights that play; those that learn are float32, and rounded when they are handed over.
    auto: float32 for a tiny policy, bfloat16 for a pretrained model."""
    hidden_size: Annotated[int, Field(ge=8, multiple_of=2)] = 64
    """Width of the tiny policy."""
    layers: Count = 3
    """Layers of the tiny policy."""
    heads: Count = 4
    """Attention heads of the tiny policy; divides hidden_size."""
    batch_tokens: Count = 65536
    """Bound on the tokens of one forward pass, padding included."""


_OWN_ARGUMENTS = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Parameters of apply_chat_template, which the renderer sets or leaves out by itself."""


class RendererSection(Section):
    """How a conversation becomes tokens. All keys but history are for models with a chat template."""

    system: str | None = None
    """System prompt; null gives none, so that the template does what it does by itself (some have a default one)."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking."""
    thinking: Literal["keep", "cut"] = "keep"
    """keep: later prompts hold the thoughts of earlier turns. cut: they hold only what was said after thinking, and a
    turn after one with thoughts starts a new sample. The environment never sees thoughts."""
    history: Literal["all"] | Count = "all"
    """Newest turns that a prompt holds: all, or a number, 1 for the current observation alone. With a number, each turn
    is a sample of its own."""

    @property
    def needing_template(self) -> list[str]:
        """Keys whose values only a chat template can follow."""
        set_keys = {"system": self.system is not None, "template": self.template, "thinking": self.thinking == "cut"}
        return [f"renderer.{key}" for key, is_set in set_keys.items() if is_set]

    @field_validator("history", mode="before")
    @classmethod
    def _all_or_a_number(cls, history: Any) -> Any:
        if history != "all" and (type(history) is not int or history < 1):
            raise ValueError("must be all, or a whole number of at least 1")
        return history

    @field_validator("template")
    @classmethod
    def _arguments_of_the_template(cls, template: dict[str, Any]) -> dict[str, Any]:
        if own := [name for name in template if name in _OWN_ARGUMENTS]:
            raise ValueError(f"{own[0]} is not an argument of the template; envkit sets it")
        return template


class RolloutSection(Section):
    """How episodes are played."""

    group_size: Count = 8
    """Episodes of the same task, which are compared with each other."""
    max_turns: Count = 16
    """Turns after which an episode is cut off."""
    max_tokens: Count = 2048
    """Bound on an episode's longest context in tokens, room for the completion included; an episode whose next prompt
    would not fit is cut off."""
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
    """Imitation before reinforcement: of the environment's own expert, or of dialogues from a file."""

    kind: Literal["auto", "demonstrations", "dialogues", "none"] = "auto"
    """demonstrations: of the environment's expert. dialogues: supervised fine-tuning on file. auto: demonstrations for
    a tiny policy, none for a pretrained model."""
    file: str | None = None
    """JSON lines, one dialogue each: {"messages": [{"role": "user", "content": "..."}, ...]}; the answers of the
    assistant are learned."""
    dialogue_batch: Count = 16
    """Dialogues an update."""
    dialogue_epochs: Count = 1
    """Passes over the file, each in an order of its own."""
    answers: Literal["expert", "bare"] = "expert"
    """How demonstrations write a move. expert: <answer>up</answer>. bare: up, which can be a single token."""
    single_turn_states: Count | None = None
    """Different single states that lessons are drawn from. null: 30000 for a tiny policy, 4096 for a pretrained
    model."""
    visit_random_share: Share | None = None
    """Share of random moves on the way to these states. null: single_turn_random_share for a tiny policy, 0.5 for a
    pretrained model. Must be 0 where the environment lists no legal moves."""
    hazard_share: Share = 0.5
    """Share of lessons in states where a careless player goes wrong."""
    single_turn_random_share: Share | None = None
    """Share of lessons that show a random move instead of a good one. null: 0.5 tiny, 0 pretrained."""
    single_turn_batch: Count | None = None
    """Lessons an update. null: 256 tiny, 32 pretrained."""
    single_turn_updates: Annotated[int, Field(ge=0)] | None = None
    """Updates with one state a sequence. null: 250 tiny, 100 pretrained."""
    multi_turn_states: Count = 4
    """States a sequence in the second stage, each with its own answer: the newest one is what counts."""
    multi_turn_updates: Annotated[int, Field(ge=0)] | None = None
    """Updates of the second stage. null: 300 tiny, 0 pretrained; 0 where renderer.history is a number, as that stage
    needs all."""
    episode_random_share: Share | None = None
    """Share of random moves in whole demonstrated episodes, which come last. null: 0.65 tiny, 0 pretrained."""
    episode_batch: Count | None = None
    """Episodes an update. null: 64 tiny, 8 pretrained."""
    episode_updates: Annotated[int, Field(ge=0)] | None = None
    """Bound on the updates of the last stage. null: 50 tiny, 30 pretrained; 0 where renderer.history is a number,
    since every state is then a sample of its own."""
    learning_rate: Rate | None = None
    """Step size in lessons and dialogues; falls as a cosine. null: 4e-3 tiny (Muon and AdamW), 5e-5 pretrained
    (AdamW)."""
    episode_learning_rate: Rate | None = None
    """The same in whole episodes. null: 2e-3 tiny, 5e-5 pretrained."""
    greedy_goal: Share = 0.95
    """The last stage with updates ends as soon as greedy play succeeds this often on validation levels."""
    check_every: Count = 25
    """Updates between two looks at validation levels."""
    check_episodes: Annotated[int, Field(ge=0)] | None = None
    """Validation levels a look; 0 does not look. null: 256 tiny, 64 pretrained, 0 for dialogues."""


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
    renderer: RendererSection = RendererSection()
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
