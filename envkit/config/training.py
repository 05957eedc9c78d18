"""The schema of a training file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, SerializeAsAny, TypeAdapter, field_validator

from envkit.config import grammar
from envkit.config.algorithm import AlgorithmSection
from envkit.config.grammar import Count, Rate, Seconds, Section, Share, UserPath
from envkit.config.kinds import ByKind
from envkit.config.parts import (
    AgentSection,
    AutoRendererSection,
    BuiltInSandboxSection,
    EngineSection,
    FilterSection,
    RendererSection,
    SandboxSection,
    TensorBoardSection,
    TorchTrainerSection,
    TrackerSection,
    TrainerSection,
    TransformersEngineSection,
)
from envkit.errors import ConfigError


class EnvSection(Section):
    """An environment and its options. To train on several environments, write a list of such sections."""

    id: str
    """Id of a registered environment, such as Sokoban-v0."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight in a list of environments. The share of an environment's tasks is its weight divided by the sum of all
    weights."""
    num_envs: Count = 256
    """Maximum number of episodes in parallel. With a list of environments, the limit is the sum of its sections."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, as in envkit.make."""
    url: Annotated[str, Field(min_length=1)] | None = None
    """Address of an `envkit serve` that plays the episodes, such as https://fleet.example.org. null: they are played in
    the sandboxes of the section sandbox, which must be left out if there is a url. All sections in a list have the same
    url, token_file, ca and outage_timeout_s."""
    token_file: UserPath | None = None
    """File with the token for that server. null: the variable ENVKIT_TOKEN."""
    ca: UserPath | None = None
    """PEM file with the certificates to trust for https, instead of the system's."""
    judge: Annotated[str, Field(min_length=1)] | None = None
    """Language model that grades answers, for an environment that needs a judge: MODEL@URL of an endpoint with OpenAI's
    API. In training also a model without a URL, as in engine.model: the run serves it with vLLM; see placement.judge.
    In a list of environments, all that need a judge have the same one."""
    outage_timeout_s: Seconds = 120.0
    """Maximum seconds to wait for a server that does not answer. Then the run saves a checkpoint and ends."""


class RolloutSection(Section):
    """Limits and sampling of the episodes."""

    group_size: Count = 8
    """Episodes per task; their returns are compared with each other."""
    max_turns: Count = 16
    """Maximum number of turns; longer episodes are cut off."""
    max_tokens: Count = 2048
    """Maximum number of tokens of a turn's prompt plus turn_tokens. If the next prompt is too long, the episode is cut
    off. At most the number of positions of a pretrained model, which is the default if it is lower."""
    turn_tokens: Count | None = None
    """Maximum number of tokens of a completion. null: 1 for a tiny policy, whose moves are single tokens; otherwise
    128."""
    step_timeout_s: Seconds = 60.0
    """Maximum seconds that a step may take. If one takes longer, the episode is void; see `retries`. If the environment
    has a limit of its own, such as that of a command, at least 30 seconds more than this limit. The same holds for
    `grade_timeout_s` and `episode_timeout_s`."""
    reset_timeout_s: Seconds | None = None
    """Maximum seconds that a reset may take. null: step_timeout_s; 600 if environments use sandboxes as tools, since a
    reset may wait for one."""
    completion_timeout_s: Seconds | None = None
    """Maximum seconds from a completion's first token to its last one, without pauses and waits for the engine. If one
    takes longer, the episode is void. null: no limit. A vLLM server
    that sends no tokens for 120 seconds counts as lost in any case."""
    player_timeout_s: Seconds | None = None
    """Maximum seconds that the policy may take for the turns of an episode together, including its waits for the
    engine, or an agent for all that it does. Then the episode is cut off and counts as it is. null: no limit, or 3600
    with an agent."""
    episode_timeout_s: Seconds | None = None
    """Maximum seconds of an episode, from its reset. If one takes longer, it is void. null: no limit."""
    grade_timeout_s: Seconds | None = 600.0
    """Maximum seconds of a grader, which runs after the last turn. If one takes longer, the episode is void. null: no
    limit."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature, in training and in sampled evaluation."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Maximum number of times that an episode is played again if a lost sandbox or a hung step has made it void."""


class TrainRolloutSection(RolloutSection):
    """Limits and sampling of the episodes, and how far they run ahead of the trainer."""

    asynchronous: bool | Literal["fast"] = False
    """Play episodes while the trainer updates. true: ahead is 1, max_lag 4 and lag_policy wait, unless they are set.
    fast: ahead is 2, max_lag 4 and lag_policy resume, unless they are set."""
    ahead: Annotated[int, Field(ge=0)] | None = None
    """Batches of episodes that may be in progress, finished or in training besides the next one. 0: the episodes of a
    train step begin when the weights of the last one are loaded. null: 0, or 1 if asynchronous; 2 if that is
    fast."""
    max_lag: Annotated[int, Field(ge=0)] | None = None
    """Maximum lag of a token that is trained on: train steps whose weights are newer than those that sampled it. At
    least ahead. null: ahead, or 4 if asynchronous."""
    lag_policy: Literal["wait", "resume", "drop"] | None = None
    """What keeps tokens within max_lag. wait: the trainer waits for episodes that would become too old. resume: it does
    not wait, and tokens that are too old are masked. drop: groups with such tokens are dropped and played again. null:
    wait, or resume if asynchronous is fast."""
    group_extra: Annotated[int, Field(ge=0)] = 0
    """Episodes that are played in addition for each group; the last ones to end are aborted. Shortens train steps, but
    long episodes are trained on less often."""
    straggler: Annotated[float, Field(gt=1)] | None = None
    """Once half of a group has ended, an episode that takes longer than this many times the median of its environment
    gets a replacement; the first to end counts, and the other is aborted. null: never."""
    replay_schedule: UserPath | None = None
    """Folder of another run, whose train steps train on the same groups in the same order, with the same members: for
    finding out why a run with ahead went wrong. Its tokens may differ. null: none."""
    on_hang: Literal["void", "fail"] = "void"
    """What becomes of an episode whose step takes longer than step_timeout_s. void: it is played again; see `retries`.
    fail: its actions are played again in two fresh environments; if both hang at the same step while others go on, it
    has failed with the rewards so far, so that the policy learns to avoid the action. Otherwise, it is void."""
    filters: list[SerializeAsAny[Annotated[FilterSection, ByKind("filters", may_be_name=True)]]] = Field(
        default_factory=list
    )
    """Reject groups that teach nothing, which others then replace: zero_variance, success_band, top_variance."""
    max_filtered: Annotated[float, Field(gt=0)] = 8.0
    """Rejected and void groups per group of a train step after which it is made with the groups that there are."""


class EvaluationSection(Section):
    """Evaluation on held-out tasks, which are never used for training. Evaluation files have this section too."""

    episodes: Annotated[int, Field(ge=0)] = 512
    """Number of tasks, or all if the split has fewer. A training run plays each with sampling and once greedily. At
    least 1 in an evaluation file; 0 in a training file: no evaluation."""
    attempts: Count = 1
    """Episodes per task with sampling."""
    split: str = "eval"
    """Split of the tasks, if the environment has splits; any: all splits, including train. A training run cannot be
    evaluated on train."""
    every: Count = 10
    """Train steps between two evaluations of a training run. There is always an evaluation before the first and after
    the last train step."""
    seed: Annotated[int, Field(ge=0)] = 1_000_003
    """Seed of the tasks; it does not depend on the seed of the run, so that runs are comparable."""


class ImitationSection(Section):
    """Imitation learning before reinforcement learning, from the environment's expert or from dialogues in a file."""

    kind: Literal["auto", "demonstrations", "dialogues", "none"] = "auto"
    """demonstrations: imitate the environment's expert. dialogues: supervised fine-tuning on `file`. none: no
    imitation. auto: demonstrations for a tiny policy, none for a pretrained model."""
    file: UserPath | None = None
    """JSON-lines file with one dialogue per line: {"messages": [{"role": "user", "content": "..."}, ...]}. The policy
    learns the assistant's answers."""
    updates: Count | None = None
    """Number of updates. null: 600 for a tiny policy and 130 for a pretrained model with demonstrations; with
    dialogues, one pass over the file, which is shuffled for each pass."""
    batch: Count | None = None
    """Samples per update: dialogues, or states with an answer. An update on whole episodes takes a quarter of this
    number. null: 16 dialogues; 256 states for a tiny policy, 32 for a pretrained model."""
    answers: Literal["expert", "bare"] = "expert"
    """Format of a demonstrated move. expert: <answer>up</answer>. bare: up, which can be a single token."""
    states: Count | None = None
    """Number of demonstrated states. null: 30000 for a tiny policy, 4096 for a pretrained model."""
    random_share: Share = 0.5
    """Share of random moves in the episodes from which demonstrated states are taken. A tiny policy also learns this
    share of random answers, so that reinforcement learning finds moves to compare. Must be 0 if the environment lists
    no legal moves."""
    learning_rate: Rate | None = None
    """Learning rate, which falls to 0 along a cosine. null: 4e-3 for a tiny policy (Muon and AdamW), 5e-5 for a
    pretrained model (AdamW), 2e-4 with LoRA."""
    goal: Share = 0.95
    """Imitation ends early when greedy play reaches this success rate on validation tasks."""
    check_episodes: Annotated[int, Field(ge=0)] | None = None
    """Number of validation tasks, which are played at least every 25 updates. With demonstrations of whole episodes,
    they are played only once these are imitated. 0: imitation does not end early. null: 256 for a tiny policy, 0 for a
    pretrained model."""


class TrackingSection(Section):
    """Recording of metrics and episodes."""

    to: list[SerializeAsAny[Annotated[TrackerSection, ByKind("trackers", may_be_name=True)]]] = Field(
        default=[TensorBoardSection()]
    )
    """Trackers, which get the metrics besides metrics.jsonl: names, or sections with the key kind and the settings of
    that tracker. tensorboard: event files in the folder tensorboard of the run. wandb: a run of Weights & Biases.
    []: no trackers."""
    trajectories_every: Annotated[int, Field(ge=0)] = 10
    """Train steps between two trajectory files, which contain some episodes of a train step. The first and the last
    train step always write one. 0: no files."""
    trajectories: Count = 8
    """Number of episodes per trajectory file, of different tasks where possible."""


_NOTATION = re.compile(r"([^\s:]+)(?::(\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*))?")


def read_gpus(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the node and the GPUs that a text such as ``n1:0-3,6`` names; a text without a colon names no GPUs.

    Raises:
        ValueError: The text is not like that, or a range has no GPUs.
    """
    found = _NOTATION.fullmatch(text)
    if found is None:
        raise ValueError("must be a node and its GPUs, such as n0:0-3,6, or only a node, such as n0")
    gpus: list[int] = []
    for part in found[2].split(",") if found[2] else ():
        first, _, last = part.partition("-")
        gpus += range(int(first), int(last or first) + 1)
        if int(last or first) < int(first):
            raise ValueError(f"the range {part} ends before it begins")
    return found[1], tuple(gpus)


def _checked(text: str) -> str:
    read_gpus(text)
    return text


Gpus = Annotated[str, AfterValidator(_checked)]
"""A node, and GPUs of it; see `read_gpus`."""


class PlacementSection(Section):
    """The machines and GPUs of the parts of a run. Without it, envkit chooses and prints its choice: the first GPU of
    this machine for the trainer, the others for the engine. n0 is the node of the run, n1 and so on are the others; a
    node may also be named by its host. n0:0-3,6 are GPUs of n0 by index.
    """

    launcher: Literal["local", "ray", "slurm"] = "local"
    """What starts processes. local: on this machine. ray: on the nodes of the Ray cluster at RAY_ADDRESS, or that of
    this machine. slurm: on the nodes of the allocation in which the run is."""
    trainer: Gpus | None = None
    """GPU of the trainer, such as n0:0. It runs in the process of the run, so the node is n0. null: the first GPU of n0
    that no server has."""
    engines: list[Gpus] = Field(default_factory=list)
    """GPUs of the servers that the run starts, such as ["n0:4-7", "n1:0-7"]; engine.replicas divides them. A node
    without GPUs gets one server for each time that it is named. []: all GPUs but the trainer's."""
    judge: Gpus | None = None
    """Node and GPUs of the server of a judge that the run serves (env.judge), such as n1:0. No other part has them.
    null: n0, if vLLM is built for CPUs or no node has GPUs; otherwise the run is refused, so name a GPU."""
    nodes: Literal["all"] | list[str] = Field(default_factory=list)
    """Machines on which the run starts nodes for sandboxes: names, or all."""


FindingName: TypeAlias = Literal[
    "weights_not_applied",
    "engine_disagrees",
    "no_valid_action",
    "every_group_filtered",
    "ratio_always_1",
    "entropy_collapse",
    "samples_lost_or_repeated",
    "completions_cut_off",
    "void_after_action",
]


class DiagnosticsSection(Section):
    """Diagnostics, which name what is wrong with a run; docs/when-a-run-looks-wrong.md lists the findings."""

    stop_on: list[FindingName] = Field(default=["weights_not_applied"])
    """Names of the findings that stop the run, after a checkpoint. The others are only reported."""


class RunConfig(Section):
    """A training file."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 7
    """Seed of all random numbers of the run. The same file always gives the same random numbers."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Number of torch threads, for sampling and for learning. 0: one for sampling from a tiny policy, otherwise one per
    core. Results are reproducible bit by bit only with the same number of threads."""
    env: EnvSection | Annotated[list[EnvSection], Field(min_length=1)]
    sandbox: SerializeAsAny[Annotated[SandboxSection, ByKind("sandboxes", "auto")]] = BuiltInSandboxSection()
    engine: SerializeAsAny[Annotated[EngineSection, ByKind("engines", "transformers")]] = TransformersEngineSection()
    renderer: SerializeAsAny[Annotated[RendererSection, ByKind("renderers", "auto")]] = AutoRendererSection()
    rollout: TrainRolloutSection = TrainRolloutSection()
    agent: AgentSection | None = None
    algorithm: AlgorithmSection = Field(default_factory=lambda: AlgorithmSection.model_validate({}))
    trainer: SerializeAsAny[Annotated[TrainerSection, ByKind("trainers", "torch_local")]] = TorchTrainerSection()
    placement: PlacementSection = PlacementSection()
    evaluation: EvaluationSection = EvaluationSection()
    imitation: ImitationSection = ImitationSection()
    tracking: TrackingSection = TrackingSection()
    diagnostics: DiagnosticsSection = DiagnosticsSection()

    @field_validator("env", mode="before")
    @classmethod
    def _one_or_several(cls, content: Any) -> Any:
        # Validate here: pydantic would report the problems of both members of the union, with their types in the keys.
        return _SECTIONS.validate_python(content) if isinstance(content, list) else EnvSection.model_validate(content)

    @property
    def envs(self) -> tuple[EnvSection, ...]:
        """The section `env`, or all sections of its list."""
        return tuple(self.env) if isinstance(self.env, list) else (self.env,)

    @property
    def served_judge(self) -> str | None:
        """The model of a judge that the run serves."""
        return next((one.judge for one in self.envs if one.judge and not one.url and "://" not in one.judge), None)

    @property
    def num_envs(self) -> int:
        """Maximum number of episodes in parallel, over all environments."""
        return sum(section.num_envs for section in self.envs)


_SECTIONS = TypeAdapter(Annotated[list[EnvSection], Field(min_length=1)])


def load(path: Path, overrides: Sequence[str] = (), *, only: str | None = None) -> RunConfig:
    """Read a training file, or its key `only`; the values of ``"a.b=value"`` overrides are YAML.

    Raises:
        ConfigError: The file cannot be read or is invalid.
    """
    if path.is_dir():
        own = path / "config.yaml"
        known = f"; that of its run is {own} (with --output {path})" if own.is_file() else ""
        raise ConfigError([f"{path}: name a training file, not a folder{known}"])
    content = grammar.content_of(path, example="env: {id: Sokoban-v0}")
    grammar.override(content, overrides)
    return grammar.check(content if only is None else {only: content.get(only)}, RunConfig)


def parse(content: Mapping[str, Any]) -> RunConfig:
    """Check a mapping against the schema; see `grammar.check`."""
    return grammar.check(content, RunConfig)


def complete(text: str) -> str:
    """Return a dumped configuration with the keys that its version did not have. Others are a `ConfigError`."""
    return dump(parse(grammar.read_yaml(text)))


def dump(config: RunConfig) -> str:
    """Return the whole configuration as YAML, including defaults, but without a section that does not apply."""
    is_served = any(section.url is not None for section in config.envs)
    content = config.model_dump(mode="json", exclude={"sandbox"} if is_served else None)
    return grammar.write_yaml(content)
