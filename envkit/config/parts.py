"""The sections of a training file whose key `kind` decides which other keys they have; see `kinds`.

A package that adds a kind extends one of the base classes: `EngineSection`, `TrainerSection`, `RendererSection`,
`SandboxSection`, `TrackerSection` or `FilterSection`. envkit itself reads the keys of the base class.
"""

# A section is frozen, so the type of `kind` may be narrower than that of its base class.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from envkit.config.grammar import Count, Rate, Seconds, Section, Share, UserPath
from envkit.restarts import RestartBudget

_HEAD_SIZE = 16
"""Size of an attention head of the tiny policy."""


class LivenessSection(Section):
    """When an unresponsive sandbox is declared lost. The exit of a sandbox is detected immediately."""

    lost_s: Seconds = 4.0
    """Seconds without an answer after which a sandbox is lost. It is probed every quarter of this time. A long step of
    an environment does not count, unless it holds Python's global interpreter lock."""


class RestartSection(Section):
    """Limit on the restarts of lost sandboxes: of each sandbox that serves environments, and of a `warm` entry's
    sandboxes together.
    """

    budget: Count = 5
    """Maximum number of restarts within one window. A further restart on a server waits until the oldest restart leaves
    the window; a training run ends instead."""
    window_s: Seconds = 600.0
    """Length of the window in seconds."""

    def limit(self) -> RestartBudget:
        """Return the limit of this section."""
        return RestartBudget(self.budget, self.window_s)


class SandboxSection(Section):
    """The sandboxes that run the environments."""

    kind: str
    """Kind of sandbox backend."""
    count: Count = 1
    """Number of sandboxes; episodes are distributed over them."""
    liveness: LivenessSection = LivenessSection()
    restarts: RestartSection = RestartSection()


class BuiltInSandboxSection(SandboxSection):
    """The sandboxes that run the environments."""

    kind: Literal["auto", "local", "docker", "process", "none"] = "auto"
    """local: bubblewrap. docker: containers of the image envkit/games. process: child processes without isolation.
    auto: local if it works on this machine, otherwise docker if it works and has the image, otherwise process, with a
    message. none: no sandboxes; environments run in the trainer's process."""


class EngineSection(Section):
    """The engine, which samples completions from the policy."""

    kind: str
    """Kind of engine."""
    model: UserPath | None = None
    """Catalogue name (`envkit model list`), GGUF file, model folder or hub name. null: the run creates a tiny policy
    with a vocabulary of the environment's words. A policy folder saved by envkit records whether the policy is tiny."""


class TransformersEngineSection(EngineSection):
    """A Hugging Face causal language model in this process."""

    kind: Literal["transformers"] = "transformers"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine. auto uses a GPU if available."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights for sampling. The trainer's weights are float32 and are rounded when the engine gets
    them. auto: bfloat16 for a pretrained model on a GPU or a processor with bfloat16 instructions, else float32."""
    hidden_size: Annotated[int, Field(ge=_HEAD_SIZE, multiple_of=_HEAD_SIZE)] = 64
    """Size of the tiny policy's hidden states; an attention head has 16 of them."""
    layers: Count = 3
    """Layers of the tiny policy."""

    @property
    def heads(self) -> int:
        """Attention heads of the tiny policy."""
        return self.hidden_size // _HEAD_SIZE


class VllmEngineSection(EngineSection):
    """vLLM servers, started by the run or running already. They need a pretrained model. Only servers need the package
    vllm: it may be installed in a virtual environment of its own, such as the one that `make vllm` makes.
    """

    kind: Literal["vllm"] = "vllm"
    url: str | list[str] | None = None
    """URL of a server that `envkit vllm` started, or of each of several replicas. null: the run starts its servers, and
    ends them."""
    seeds: bool = False
    """Whether each request has a seed of its own. true: vLLM repeats a completion for the same seed, but samples row by
    row, which is slow on a GPU. Runs do not repeat to the last digit either way."""
    weights_folder: UserPath | None = None
    """Existing folder for the weights on their way to the servers, which must see it at the same path: for servers on
    other machines, a folder of a shared file system. null: /dev/shm, or else the run's folder, from which servers on
    other machines fetch the weights over HTTP."""
    weights_url: str | None = None
    """URL at which the servers fetch the weights from the run, such as http://10.0.0.5:8300; the run listens at that
    port. null: only servers on other machines fetch them, at an address of this machine and a free port."""
    python: UserPath | None = None
    """Python interpreter that has vllm. null: that of `make vllm`, or else the one that runs envkit."""
    replicas: Count | None = None
    """Number of servers to start; see placement.engines. A server with several GPUs uses tensor parallelism. null: one
    for each GPU, or one server without GPUs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights for sampling, as of the engine transformers."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that a server may use. If a server has the trainer's GPU, it must be set, such as
    0.4."""
    max_num_seqs: Count = 64
    """Maximum number of completions in progress per server; others wait in the run."""
    arguments: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further arguments of the servers, such as max-num-batched-tokens: 8192; true stands for a flag without value."""

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of running servers; empty if the run starts them."""
        return () if self.url is None else (self.url,) if isinstance(self.url, str) else tuple(self.url)


_OWN_ARGUMENTS = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Parameters of apply_chat_template that are reserved for the renderer."""


class RendererSection(Section):
    """Conversion of a conversation to tokens."""

    kind: str
    """Kind of renderer."""
    history: Literal["all"] | Count = "all"
    """Number of turns in a prompt, including the current one, or all. 1: only the current observation. With a number,
    each turn is a separate sample."""

    @field_validator("history", mode="before")
    @classmethod
    def _all_or_a_number(cls, history: Any) -> Any:
        if history != "all" and (type(history) is not int or history < 1):
            raise ValueError("must be 'all' or a whole number of at least 1")
        return history


class AutoRendererSection(RendererSection):
    """Conversion of a conversation to tokens. The keys system, template and thinking need a chat template."""

    kind: Literal["auto"] = "auto"
    """auto: the chat template of the model; without one, an answer is the text in `<answer>` tags."""
    system: str | None = None
    """System prompt. null: no system prompt is passed to the template; some templates then add a default."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking."""
    thinking: Literal["keep", "cut"] = "keep"
    """keep: later prompts include the thoughts of earlier turns. cut: later prompts omit thoughts, so the turn that
    follows a turn with thoughts starts a new sample. The environment never sees thoughts."""

    @property
    def needing_template(self) -> list[str]:
        """The keys whose values in this section need a chat template."""
        set_keys = {"system": self.system is not None, "template": self.template, "thinking": self.thinking == "cut"}
        return [f"renderer.{key}" for key, is_set in set_keys.items() if is_set]

    @field_validator("template")
    @classmethod
    def _arguments_of_the_template(cls, template: dict[str, Any]) -> dict[str, Any]:
        if own := [name for name in template if name in _OWN_ARGUMENTS]:
            raise ValueError(f"{own[0]} is reserved: envkit sets it; remove it")
        return template


class TrainerSection(Section):
    """The trainer, and the length of the run."""

    kind: str
    """Kind of trainer."""
    steps: Annotated[int, Field(ge=0)] = 100
    """Number of train steps; each plays groups_per_step groups and learns from them. 0: stop after the imitation."""
    groups_per_step: Count = 32
    """Tasks per train step."""
    checkpoint_every: Count = 10
    """Train steps between two checkpoints."""
    keep_checkpoints: Count = 2
    """Number of most recent checkpoints to keep, beside that of the evaluation with the highest success."""


class LoraSection(Section):
    """LoRA: the model's weights are frozen, and an adapter of low-rank matrices beside its linear layers is trained.
    Only for a pretrained model. With null, all weights are trained. The frozen weights have the number
    format of trainer.precision; the adapter is float32.
    """

    rank: Count = 16
    """Rank of the adapter's matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Names of the layers with an adapter, such as `[q_proj, v_proj]`. all-linear: all linear layers except the output
    layer."""


class TorchTrainerSection(TrainerSection):
    """A trainer in one process, on one device."""

    kind: Literal["torch_local"] = "torch_local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer. auto uses a GPU if available."""
    learning_rate: Rate | None = None
    """AdamW's learning rate for the policy. null: 5e-4 for a tiny policy, 1e-6 for a pretrained model, 2e-5 with
    LoRA."""
    critic_learning_rate: Rate | None = None
    """AdamW's learning rate for the critic (ppo). null: 1e-3 for a tiny policy, 1e-5 for a pretrained model, 1e-4 with
    LoRA."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of both learning rates; linear and cosine decrease to 0 over `steps`."""
    schedule_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Train steps over which the learning rates rise linearly to their value."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay; not applied to norms and biases."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products while learning; trained weights stay float32. auto: bfloat16 (autocast) for a
    pretrained model on a GPU or a processor with bfloat16 instructions, else float32."""
    gradient_checkpointing: bool | None = None
    """Whether to recompute activations in the backward pass, which saves memory and takes more time. null: false for a
    tiny policy, true for a pretrained model."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum norm of the gradient; larger gradients are clipped."""
    micro_tokens: Count | None = None
    """Maximum number of tokens of one forward and backward pass, including padding. null: 16384 for a tiny policy, 4096
    for a pretrained model."""
    packing: bool = False
    """Whether several short samples without a common prefix share a row of a pass, which avoids padding."""
    lora: LoraSection | None = None
    """The adapter; null: all weights are trained. Left out: an adapter for a model with at least 7e9 parameters, by its
    config.json, and null for others."""


class TrackerSection(Section):
    """A tracker, to which the metrics of a run are sent."""

    kind: str
    """Kind of tracker."""


class TensorBoardSection(TrackerSection):
    """Event files for TensorBoard, in the folder tensorboard of the run."""

    kind: Literal["tensorboard"] = "tensorboard"


class WandbSection(TrackerSection):
    """A run of Weights & Biases, with its files in the folder wandb of the run. Its settings are wandb's own variables,
    such as WANDB_PROJECT (default envkit), WANDB_NAME, WANDB_RUN_GROUP, WANDB_TAGS and WANDB_MODE.
    """

    kind: Literal["wandb"] = "wandb"


class FilterSection(Section):
    """A filter of groups: it decides which ones are trained on."""

    kind: str
    """Kind of filter."""


class ZeroVarianceSection(FilterSection):
    """Rejects groups whose returns are all equal."""

    kind: Literal["zero_variance"] = "zero_variance"


class SuccessBandSection(FilterSection):
    """Rejects groups whose share of successful episodes is below low or above high."""

    kind: Literal["success_band"] = "success_band"
    low: Share = 0.1
    """Lowest share."""
    high: Share = 0.9
    """Highest share."""


class TopVarianceSection(FilterSection):
    """Keeps the groups whose returns vary most, compared with the last 256 groups."""

    kind: Literal["top_variance"] = "top_variance"
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of groups to keep."""


class AgentSection(Section):
    """A foreign agent that plays the episodes: a program or a function that calls the policy as if it were a model
    behind OpenAI's or Anthropic's API. rollout.max_turns then limits its calls, rollout.max_tokens each prompt with its
    answer, and rollout.player_timeout_s the time of the agent.
    """

    command: list[str] = Field(default_factory=list)
    """Program and arguments, such as [mini, --task, "{task}"]. {task} stands for the text of the task, {model} for the
    name of the policy."""
    function: str = ""
    """Function in place of a command, as MODULE:NAME, or by its name (@envkit.agent, or an agent of a package). It gets
    an envkit.AgentTask, and may be async."""
    place: Literal["sandbox", "beside"] = "sandbox"
    """Where the command runs. sandbox: in the sandbox of the episode, which reaches the policy and no network. beside:
    on this machine; it plays actions by POST {"action": "..."} to the address in the variable ENVKIT_STEP_URL."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, besides those with the address and the key of the policy."""
    views: dict[str, UserPath] = Field(default_factory=dict)
    """Files and folders of this machine that the sandboxes see read-only, by their path inside, such as the virtual
    environment of the agent."""
    train: list[str] = Field(default_factory=list)
    """Regular expressions. Only calls whose model name or system prompt contains a match are trained on. []: all."""
    ignore: list[str] = Field(default_factory=list)
    """Regular expressions of text that changes between the calls of an episode, such as the time. It is removed from
    system prompts, so that a call continues the ones before it."""
