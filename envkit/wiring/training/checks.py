"""Checks of a training file for problems that its schema cannot find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from envkit import config
from envkit.config import RunConfig
from envkit.config.parts import (
    AutoRendererSection,
    TorchTrainerSection,
    TransformersEngineSection,
    VllmEngineSection,
    WandbSection,
)
from envkit.config.training import EnvSection
from envkit.env import AsyncEnv
from envkit.errors import ConfigError, OptionError, UnknownEnvError, UsageError
from envkit.http.client.chat import Address
from envkit.installation import EXTRAS, why_missing
from envkit.registry import EnvSpec
from envkit.sandbox.bubblewrap.backend import why_unavailable
from envkit.sandbox.docker import backend as docker
from envkit.trainer_bridge.algorithms.algorithm import Algorithm
from envkit.trainer_bridge.scheduler.pace import LagPolicy
from envkit.trainer_bridge.sources.dialogues import parse_dialogues
from envkit.wiring import environments, tasks
from envkit.wiring.environments import Resources
from envkit.wiring.launch.local import this_node
from envkit.wiring.launch.placement import place_run
from envkit.wiring.training.agents import check_agent
from envkit.wiring.training.kinds import vllm
from envkit.wiring.training.models import CATALOGUE, check_tokens, is_cached, is_path, verify
from envkit.wiring.training.remote import check_served, problem_of
from envkit.wiring.training.resolve import (
    TURN_TOKENS,
    creates_policy,
    default_lora,
    is_served_only,
    keys_of,
    lag_of,
    policy_kind,
    replay_of,
)

_HIGHEST_RATE = 1e-4
"""Learning rate above which training may destroy a pretrained model."""
_HIGHEST_LORA_RATE = 1e-3
"""The same with LoRA."""


def check(run: RunConfig) -> list[str]:
    """Return the problems of a training file that its schema cannot find. Each is a line that starts with its key."""
    problems: dict[str, None] = {}
    for examine in (
        _packages,
        check_served,
        _envs,
        _sandbox,
        _engine,
        _renderer,
        _rollout,
        _agent,
        _algorithm,
        _trainer,
        _imitation,
        _placement,
    ):
        try:
            for line in examine(run):
                problems[line] = None
        except ConfigError as error:
            problems.update(dict.fromkeys(error.problems))
    return list(problems)


def env_problems(path: Path, overrides: Sequence[str]) -> list[str]:
    """Return the problems of the environments in a training file whose other keys may be invalid."""
    try:
        return [*_envs(config.load(path, overrides, only="env"))]
    except ConfigError as error:
        return [one for one in error.problems if one.startswith("env.")]


async def check_docker(run: RunConfig) -> list[str]:
    """Return one problem if `run` needs Docker sandboxes and they cannot start on this machine; otherwise return [].

    The problem is a line like those of `check`. It describes what the Docker client, its daemon or the image lacks.
    """
    if run.sandbox.kind != "docker" or (why := await docker.why_unavailable(docker.GAMES_IMAGE)) is None:
        return []
    return [f"sandbox.kind: docker does not work here: {why}; or use auto or process"]


def unverified(run: RunConfig) -> list[str]:
    """Return warnings: a model that would be downloaded, a high learning rate."""
    keys = {section.judge: f"{key}.judge" for key, section in zip(keys_of(run), run.envs, strict=True)}
    named = [("engine.model", run.engine.model), (keys.get(run.served_judge, ""), run.served_judge)]
    lines = [
        f"{key}: {name} is not in the hub's cache on this machine, so training would download it; "
        "check did not ask the hub whether the model exists"
        for key, name in named
        if name is not None and name not in CATALOGUE and not is_path(name) and not is_cached(name)
    ]
    trainer = run.trainer
    if isinstance(trainer, TorchTrainerSection) and policy_kind(run) == "pretrained":
        rate = trainer.learning_rate if "learning_rate" in trainer.model_fields_set else None
        highest, usual = (_HIGHEST_LORA_RATE, "2e-5 with LoRA") if _has_lora(run) else (_HIGHEST_RATE, "1e-6")
        if rate is not None and rate > highest:
            line = f"trainer.learning_rate: {rate:g} is above {highest:g}, which can destroy a pretrained model; "
            lines.append(f"{line}about {usual} is usual")
    return lines


def _has_lora(run: RunConfig) -> bool:
    return getattr(run.trainer, "lora", None) is not None or default_lora(run) is not None


def _packages(run: RunConfig) -> Iterator[str]:
    if why := next(filter(None, map(why_missing, EXTRAS["train"])), None):
        yield f"engine.kind: {run.engine.kind} does not work here: {why}"
    for index, tracker in enumerate(run.tracking.to):
        if isinstance(tracker, WandbSection) and (why := why_missing("wandb")):
            yield f"tracking.to.{index}: wandb does not work here: {why}"


def _envs(run: RunConfig) -> Iterator[str]:
    for key, section in zip(keys_of(run), run.envs, strict=True):
        if not is_served_only(section):
            try:
                yield from _env(run, key, section)
            except ConfigError as error:
                yield from error.problems


def _env(run: RunConfig, key: str, section: EnvSection) -> Iterator[str]:
    """Check one environment that is installed here; `key` is the key of its section."""
    try:
        spec = environments.find(section.id)
        if problems := [*_needs(run, key, section, spec)]:
            yield from problems
            return
        made = environments.open_env(section.id, Resources.unused(), **section.options)
        splits = tasks.splits(spec, section.options)
        tasks.count(spec, section.options, "train", 1)
        if run.evaluation.episodes:
            yield from _split(run.evaluation.split, spec, section)
        if not isinstance(made, AsyncEnv):
            made.close()
        if not isinstance(made, AsyncEnv) and not spec.needs:  # `make` has neither sandboxes nor a judge
            with environments.make(section.id) as env:
                # Pass the options to `reset` too, because training does so for each episode.
                _, info = env.reset(seed=0, options={**section.options})
            if policy_kind(run) == "tiny" and not info.get("legal_moves"):
                reason = f"a tiny policy needs a list of legal moves, which {section.id} does not give; name a model"
                yield f"engine.model: {reason}"
        if "split" in section.options and splits:
            yield f"{key}.options.split: training and evaluation set the split themselves; leave it out"
    except UnknownEnvError as error:
        yield f"{key}.id: {error}"
    except OptionError as error:
        yield f"{key}.options.{error.option}: {error.reason}"
    except UsageError as error:
        yield f"{key}.options: {error.detail}"
    except TypeError as error:
        yield f"{key}.options: {section.id} rejects them: {error}"


def _split(split: str, spec: EnvSpec, section: EnvSection) -> Iterator[str]:
    """Check the split of the evaluation: it exists, and training does not play its tasks."""
    with problem_of("evaluation.split"):
        tasks.count(spec, section.options, split, 1)
    is_missing = spec.task_set is not None and split not in tasks.splits(spec, section.options)
    if split == "train" or is_missing:  # a missing validation split is the same as train
        yield f"evaluation.split: training plays the tasks of {split}; use a split that it does not play"


def _needs(run: RunConfig, key: str, section: EnvSection, spec: EnvSpec) -> Iterator[str]:
    """Check that the run has what the environment needs, unless a server plays it."""
    judge = section.judge
    if section.url is None and "sandbox" in spec.needs and run.sandbox.kind == "none":
        yield f"sandbox.kind: {section.id} needs sandboxes; use auto, local or docker"
    if section.url is None and "judge" in spec.needs and judge is None:
        yield f"{key}.judge: {section.id} needs a judge; set MODEL@URL of an endpoint with OpenAI's API, or a model"
    if section.url is None and judge is not None and "judge" not in spec.needs:
        yield f"{key}.judge: {section.id} needs no judge; leave it out"
    elif judge is not None and ("@" in judge or "://" in judge):
        try:
            Address.of(judge, f"{key}.judge", prefix="")
        except UsageError as error:
            yield str(error)
    elif judge is not None and judge == run.served_judge:
        yield from _model(judge, f"{key}.judge")
        served = VllmEngineSection(model=judge, python=getattr(run.engine, "python", None))
        yield from (one.replace("engine.model", f"{key}.judge") for one in vllm.problems(served))
    if spec.needs and policy_kind(run) == "tiny":
        yield f"engine.model: a tiny policy cannot play {section.id}, since it lists no moves; name a model"


def _sandbox(run: RunConfig) -> Iterator[str]:
    if run.sandbox.kind == "local" and (why := why_unavailable()) is not None:
        yield f"sandbox.kind: local does not work here: {why}; use auto or process"


def _engine(run: RunConfig) -> Iterator[str]:
    section, rollout = run.engine, run.rollout
    if isinstance(section, TransformersEngineSection):
        _check_device("engine", section.device)
    if isinstance(section, VllmEngineSection) and (found := vllm.problems(section)):
        yield from found
    elif section.model is not None:
        found = [*_model(section.model)]
        yield from found
        if not found and policy_kind(run) == "pretrained":
            name = section.model if "max_tokens" in rollout.model_fields_set else None  # the default is lowered
            check_tokens(name, rollout.max_tokens, rollout.turn_tokens or TURN_TOKENS)


def _check_device(section: str, device: str) -> None:
    if device == "cuda":
        from envkit.wiring.training.torch_parts import device_of  # imported late: loads torch, which takes seconds

        with problem_of(f"{section}.device"):
            device_of("cuda")


def _renderer(run: RunConfig) -> Iterator[str]:
    section = run.renderer
    if policy_kind(run) == "tiny" and isinstance(section, AutoRendererSection):
        for key in section.needing_template:
            yield f"{key}: needs a chat template, which a tiny policy does not have"


def _model(name: str, key: str = "engine.model") -> Iterator[str]:
    try:
        verify(name)
    except UsageError as error:
        yield f"{key}: {error.detail}"
        return
    if name in CATALOGUE or is_path(name):
        return
    from huggingface_hub import constants  # imported late, because the import is slow
    from huggingface_hub.errors import HFValidationError

    try:
        if not is_cached(name) and constants.HF_HUB_OFFLINE:
            yield f"{key}: {name} is not in the hub's cache, and HF_HUB_OFFLINE forbids downloads"
    except HFValidationError:
        yield f"{key}: {name} is neither a folder here nor a model name of the hub"


def _algorithm(run: RunConfig) -> Iterator[str]:
    algorithm, whole = Algorithm.of(run.algorithm), run.renderer.history == "all"
    _, max_lag, _ = lag_of(run.rollout)
    yield from algorithm.problems(group_size=run.rollout.group_size, whole_history=whole, max_lag=max_lag)
    if run.algorithm.reference is not None:
        yield from _model(run.algorithm.reference, "algorithm.reference")


def _rollout(run: RunConfig) -> Iterator[str]:
    section, (ahead, max_lag, policy) = run.rollout, lag_of(run.rollout)
    if max_lag < ahead:
        reason = f"must be at least rollout.ahead, which is {ahead}, or no batch could be in time"
        yield f"rollout.max_lag: {reason}; got {max_lag}"
    if max_lag and not ahead and not section.filters:
        yield "rollout.max_lag: no token is old while rollout.ahead is 0; leave it out, or set ahead"
    if not ahead and policy is not LagPolicy.WAIT:
        yield "rollout.lag_policy: no token is old while rollout.ahead is 0; leave it out, or set ahead"
    with problem_of("rollout.replay_schedule"):
        schedule = replay_of(run)
    if schedule is not None and run.trainer.steps > (last := max(schedule, default=0)):
        reason = f"{section.replay_schedule} has the groups of {last} train steps"
        yield f"rollout.replay_schedule: {reason}; set trainer.steps to at most {last}"


def _agent(run: RunConfig) -> Iterator[str]:
    if run.agent is None:
        return
    yield from check_agent(run.agent, run.renderer)
    if run.rollout.on_hang == "fail":
        yield "rollout.on_hang: the actions of an agent cannot be played again; use void"
    if run.engine.model is None:
        yield "agent: an agent calls a model with a chat template; name one with engine.model"
    if run.envs[0].url is not None and run.agent.command and run.agent.place == "sandbox":
        yield "agent.place: the sandboxes of a server at env.url are out of reach; use beside"


def _trainer(run: RunConfig) -> Iterator[str]:
    if isinstance(run.trainer, TorchTrainerSection):
        _check_device("trainer", run.trainer.device)
    if policy_kind(run) == "tiny" and _has_lora(run):
        yield "trainer.lora: a tiny policy is trained as a whole; use null, or name a model in engine.model"


def _placement(run: RunConfig) -> Iterator[str]:
    """Check the device map, if this machine is all that it names: the nodes of a cluster are known when the run starts.

    A broken engine.python is the subject of `_engine`.
    """
    if run.placement.launcher == "local":
        with suppress(UsageError):
            place_run(run, [this_node()])
    yield from ()


def _imitation(run: RunConfig) -> Iterator[str]:
    section = run.imitation
    if section.kind == "dialogues":
        if policy_kind(run) == "tiny":
            yield "imitation.kind: dialogues need a model with a chat template; name one in engine.model"
        elif section.file is None or not Path(section.file).is_file():
            yield f"imitation.file: must name a file of dialogues as JSON lines, got {section.file}"
        else:
            try:
                parse_dialogues(Path(section.file))
            except UsageError as error:
                yield error.detail
    elif section.file is not None:
        yield f"imitation.file: needs imitation.kind: dialogues, got {section.kind}; or leave it out"
    if section.kind == "none" and creates_policy(run):
        yield "imitation.kind: a new tiny policy needs demonstrations; use auto, or name an engine.model"
    demonstrates = section.kind == "demonstrations" or (section.kind == "auto" and policy_kind(run) == "tiny")
    known = {spec.id: spec for spec in environments.registered()}
    lacking = [one.id for one in run.envs if one.id in known and known[one.id].expert is None]
    if demonstrates and lacking:
        yield f"imitation.kind: {lacking[0]} has no expert to demonstrate; use none, and set engine.model"
