"""Training file: the configuration of a run."""

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
    """Environment of the run."""

    id: str
    """Registered environment, such as Sokoban-v0."""
    num_envs: Count = 256
    """Number of concurrent episodes."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, as for envkit.make."""


class SandboxSection(Section):
    """Where the environments run."""

    kind: Literal["auto", "local", "docker", "process", "none"] = "auto"
    """local: bubblewrap. docker: containers of the image envkit/games. process: a child process without isolation.
    auto: local if it works, otherwise process, with a warning. none: in the trainer's own process."""
    count: Count = 1
    """Number of sandboxes; the episodes are spread over them."""
    health: HealthSection = HealthSection()
    restarts: RestartSection = RestartSection()


class TransformersEngineSection(Section):
    """A Hugging Face causal language model in this process."""

    kind: Literal["transformers"] = "transformers"
    model: str | None = None
    """Name in the catalogue (`envkit model list`), GGUF file, model folder or hub name; null for a new tiny policy with
    the environment's vocabulary. A policy folder saved by envkit records whether it is tiny."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights for sampling; the trained weights are float32 and are rounded on transfer. auto:
    float32 for a tiny policy, bfloat16 for a pretrained model."""
    hidden_size: Annotated[int, Field(ge=8, multiple_of=2)] = 64
    """Width of the tiny policy."""
    layers: Count = 3
    """Layers of the tiny policy."""
    heads: Count = 4
    """Attention heads of the tiny policy; divides hidden_size."""
    batch_tokens: Count = 65536
    """Maximum tokens of one forward pass, padding included."""


_OWN_ARGUMENTS = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Parameters of apply_chat_template that the renderer controls."""


class RendererSection(Section):
    """Conversion of conversations to tokens. All keys but history are for models with a chat template."""

    system: str | None = None
    """System prompt; null for the template's default, if it has one."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking."""
    thinking: Literal["keep", "cut"] = "keep"
    """keep: later prompts contain the thoughts of earlier turns. cut: they contain only the text after the thoughts,
    and the turn after one with thoughts starts a new sample. The environment never sees thoughts."""
    history: Literal["all"] | Count = "all"
    """Number of latest turns in a prompt, or all; 1 is the current observation alone. With a number, each turn is a
    separate sample."""

    @property
    def needing_template(self) -> list[str]:
        """Keys that are set and need a chat template."""
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
    """Number of episodes per task, whose rewards are compared."""
    max_turns: Count = 16
    """Turns after which an episode is cut off."""
    max_tokens: Count = 2048
    """Maximum context of an episode in tokens, including the completion; an episode whose next prompt does not fit is
    cut off."""
    turn_tokens: Count | None = None
    """Maximum tokens of one completion; null for 1 with the tiny policy (a move is a word) and 128 with others."""
    timeout_s: Seconds = 60.0
    """Timeout of a reset or step in seconds; the episode is then void."""
    temperature: Annotated[float, Field(gt=0), Exponent] = 1.0
    """Sampling temperature, in training and in sampled evaluation."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Retries of a void episode (lost sandbox, step timeout)."""


class AlgorithmSection(Section):
    """Policy gradient. A key that is null takes the preset's value."""

    preset: str = "grpo"
    """grpo, reinforce or ppo."""
    advantage: str | None = None
    """group_normalised, batch_normalised or gae."""
    loss: str | None = None
    """clipped or reinforce."""
    gamma: Share | None = None
    """Discount per turn."""
    gae_lambda: Share | None = None
    """Weight of longer estimates (ppo)."""
    clip: Annotated[float, Field(gt=0, lt=1), Exponent] | None = None
    """Half-width of the trust region around ratio 1."""
    entropy_coefficient: Annotated[float, Field(ge=0), Exponent] | None = None
    """Weight of the entropy bonus."""
    kl_coefficient: Annotated[float, Field(ge=0), Exponent] | None = None
    """Weight of the KL divergence from the policy at the start of reinforcement learning; 0 keeps no reference."""
    value_coefficient: Annotated[float, Field(ge=0), Exponent] | None = None
    """Weight of the critic's loss (ppo)."""
    advantage_clip: Annotated[float, Field(gt=0), Exponent] | None = None
    """Maximum absolute advantage; null for no limit."""
    epochs: Count | None = None
    """Passes over the samples of one train step."""
    minibatches: Count | None = None
    """Optimiser updates per pass."""


class TorchTrainerSection(Section):
    """One process, one device."""

    kind: Literal["torch_local"] = "torch_local"
    steps: Annotated[int, Field(ge=0)] = 100
    """Train steps; each plays groups_per_step groups and learns from them. 0 stops after the warm-up."""
    groups_per_step: Count = 32
    """Tasks per train step."""
    learning_rate: Rate | None = None
    """AdamW's learning rate for the policy; null for 5e-4 with a tiny policy and 1e-6 with a pretrained model."""
    critic_learning_rate: Rate | None = None
    """AdamW's learning rate for the critic (ppo); null for 1e-3 with a tiny policy and 1e-5 with a pretrained model."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of both learning rates; linear and cosine decay to 0 over `steps`."""
    schedule_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Train steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0), Exponent] = 0.0
    """AdamW's weight decay; not applied to norms and biases."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products in training; the weights stay float32. auto: float32 for a tiny policy, bfloat16
    (autocast) for a pretrained model."""
    gradient_checkpointing: bool | None = None
    """Whether to recompute activations in the backward pass, which saves memory and costs time. null for false with a
    tiny policy and true with a pretrained model."""
    max_grad_norm: Annotated[float, Field(gt=0), Exponent] = 1.0
    """Maximum norm of the gradient, which is clipped."""
    micro_tokens: Count | None = None
    """Maximum tokens of one forward and backward pass, padding included; null for 16384 with a tiny policy and 4096
    with a pretrained model."""
    checkpoint_every: Count = 10
    """Train steps between two checkpoints."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Torch threads. 0: a tiny policy samples with one thread and trains with one per core, or with one if the load
    average at the start exceeds the number of cores. Bitwise repeatability needs the same number."""


class EvaluationSection(Section):
    """Evaluation of success on held-out levels."""

    episodes: Annotated[int, Field(ge=0)] = 512
    """Held-out tasks, each played once sampled and once greedily; 0 disables evaluation."""
    every: Count = 10
    """Train steps between two evaluations; one before and one after the run are always done."""
    seed: Annotated[int, Field(ge=0)] = 1_000_003
    """Seed of the held-out tasks, the same for every run seed, so that runs compare."""


class WarmupSection(Section):
    """Imitation learning before reinforcement learning: of the environment's expert, or of dialogues from a file."""

    kind: Literal["auto", "demonstrations", "dialogues", "none"] = "auto"
    """demonstrations: of the environment's expert. dialogues: supervised fine-tuning on file. auto: demonstrations for
    a tiny policy, none for a pretrained model."""
    file: str | None = None
    """JSON lines, one dialogue each: {"messages": [{"role": "user", "content": "..."}, ...]}; the assistant's messages
    are learned."""
    dialogue_batch: Count = 16
    """Dialogues per update."""
    dialogue_epochs: Count = 1
    """Passes over the file, each in a new order."""
    answers: Literal["expert", "bare"] = "expert"
    """How demonstrations write a move. expert: <answer>up</answer>. bare: up, which can be a single token."""
    single_turn_states: Count | None = None
    """Number of distinct states that lessons are drawn from. null: 30000 for a tiny policy, 4096 for a pretrained
    model."""
    visit_random_share: Share | None = None
    """Share of random moves on the way to these states. null: single_turn_random_share for a tiny policy, 0.5 for a
    pretrained model. Must be 0 if the environment lists no legal moves."""
    hazard_share: Share = 0.5
    """Share of lessons in states where a careless player goes wrong."""
    single_turn_random_share: Share | None = None
    """Share of lessons that show a random move instead of a good one. null: 0.5 tiny, 0 pretrained."""
    single_turn_batch: Count | None = None
    """Lessons per update. null: 256 tiny, 32 pretrained."""
    single_turn_updates: Annotated[int, Field(ge=0)] | None = None
    """Updates with one state per sequence. null: 250 tiny, 100 pretrained."""
    multi_turn_states: Count = 4
    """States per sequence in the second stage; each has its own answer, which depends on the newest state only."""
    multi_turn_updates: Annotated[int, Field(ge=0)] | None = None
    """Updates of the second stage. null: 300 tiny, 0 pretrained; 0 if renderer.history is a number, as that stage needs
    all."""
    episode_random_share: Share | None = None
    """Share of random moves in whole demonstrated episodes, the last stage. null: 0.65 tiny, 0 pretrained."""
    episode_batch: Count | None = None
    """Episodes per update. null: 64 tiny, 8 pretrained."""
    episode_updates: Annotated[int, Field(ge=0)] | None = None
    """Maximum updates of the last stage. null: 50 tiny, 30 pretrained; 0 if renderer.history is a number, since each
    state is then a separate sample."""
    learning_rate: Rate | None = None
    """Learning rate for lessons and dialogues, with cosine decay. null: 4e-3 tiny (Muon and AdamW), 5e-5 pretrained
    (AdamW)."""
    episode_learning_rate: Rate | None = None
    """Learning rate for whole episodes. null: 2e-3 tiny, 5e-5 pretrained."""
    greedy_goal: Share = 0.95
    """The last stage with updates ends once greedy play reaches this success rate on validation levels."""
    check_every: Count = 25
    """Updates between two validations."""
    check_episodes: Annotated[int, Field(ge=0)] | None = None
    """Levels per validation; 0 disables it. null: 256 tiny, 64 pretrained, 0 for dialogues."""


class TrackingSection(Section):
    """Files written besides the checkpoints."""

    tensorboard: bool = True
    """Whether to write event files for TensorBoard."""
    trajectories_every: Annotated[int, Field(ge=0)] = 10
    """Train steps between two samples of episodes; the first and the last step are always sampled. 0 writes none."""
    trajectories: Count = 8
    """Episodes per sample, from as many tasks as possible."""


class RunConfig(Section):
    """A training file."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 7
    """Random seed; all random numbers follow from it and the rest of the file."""
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
        overrides: ``"a.b=value"`` strings with YAML values, applied after the file.

    Raises:
        ConfigError: The file cannot be read, or a value is invalid.
    """
    content = grammar.content_of(path, example="env: {id: Sokoban-v0}")
    grammar.override(content, overrides)
    return grammar.check(content, RunConfig)


def parse(content: Mapping[str, Any]) -> RunConfig:
    """Validate a mapping as a training file.

    Raises:
        ConfigError: One line for each problem, each starting with its key.
    """
    return grammar.check(content, RunConfig)


def dump(config: RunConfig) -> str:
    """Return the whole configuration as YAML, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
