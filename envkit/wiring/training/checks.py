"""Checks of a training file for problems that its schema cannot find."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from envkit import config
from envkit.config import RunConfig
from envkit.config.algorithm import ALIASES
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
from envkit.wiring.contexts import Model, RendererContext
from envkit.wiring.environments import Resources
from envkit.wiring.launch.local import this_node
from envkit.wiring.launch.placement import place_run
from envkit.wiring.training.agents import check_agent
from envkit.wiring.training.kinds import vllm
from envkit.wiring.training.models import CATALOGUE, check_length, check_room, folder_of, is_cached, is_path, verify
from envkit.wiring.training.remote import check_served
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
    problems: list[str] = []
    for examine in (
        _check_packages,
        check_served,
        _check_env,
        _check_sandbox,
        _check_engine,
        _check_renderer,
        _check_rollout,
        _check_agent,
        _check_algorithm,
        _check_trainer,
        _check_imitation,
        _check_placement,
    ):
        try:
            examine(run)
        except ConfigError as error:
            problems += error.problems
    return list(dict.fromkeys(problems))


def env_problems(path: Path, overrides: Sequence[str]) -> list[str]:
    """Return the problems of the environments in a training file whose other keys may be invalid."""
    try:
        _check_env(config.load(path, overrides, only="env"))
    except ConfigError as error:
        return [one for one in error.problems if one.startswith("env.")]
    return []


async def check_docker(run: RunConfig) -> list[str]:
    """Return one problem if `run` needs Docker sandboxes and they cannot start on this machine; otherwise return [].

    The problem is a line like those of `check`. It describes what the Docker client, its daemon or the image lacks.
    """
    if run.sandbox.kind != "docker" or (why := await docker.why_unavailable(docker.GAMES_IMAGE)) is None:
        return []
    return [f"sandbox.kind: docker does not work here: {why}; or use auto or process"]


def unverified(run: RunConfig) -> list[str]:
    """Return warnings: another project's name of a preset, a model that would be downloaded, a high learning rate."""
    trainer, rate = run.trainer, None
    if (
        isinstance(trainer, TorchTrainerSection)
        and "learning_rate" in trainer.model_fields_set
        and policy_kind(run) == "pretrained"
    ):
        rate = trainer.learning_rate
    name = run.algorithm.preset
    alias = [f"algorithm.preset: {name} is called {ALIASES[name]} here"] if name in ALIASES else []
    keys = {section.judge: f"{key}.judge" for key, section in zip(keys_of(run), run.envs, strict=True)}
    judge = [] if run.served_judge is None else _uncached_model(run.served_judge, keys[run.served_judge])
    return [*alias, *_uncached_model(run.engine.model), *judge, *_high_learning_rate(rate, has_lora=_has_lora(run))]


def _has_lora(run: RunConfig) -> bool:
    return getattr(run.trainer, "lora", None) is not None or default_lora(run) is not None


def _high_learning_rate(rate: float | None, *, has_lora: bool) -> list[str]:
    highest, usual = (_HIGHEST_LORA_RATE, "2e-5 with LoRA") if has_lora else (_HIGHEST_RATE, "1e-6")
    if rate is None or rate <= highest:
        return []
    line = f"trainer.learning_rate: {rate:g} is above {highest:g}, which can destroy a pretrained model; "
    return [f"{line}about {usual} is usual"]


def _uncached_model(name: str | None, key: str = "engine.model") -> list[str]:
    if name is None or name in CATALOGUE or is_path(name) or is_cached(name):
        return []
    line = f"{key}: {name} is not in the hub's cache on this machine, so training would download it; "
    return [f"{line}check did not ask the hub whether the model exists"]


def _check_packages(run: RunConfig) -> None:
    problems: list[str] = []
    if why := next(filter(None, map(why_missing, EXTRAS["train"])), None):
        problems.append(f"engine.kind: {run.engine.kind} does not work here: {why}")
    for index, tracker in enumerate(run.tracking.to):
        if isinstance(tracker, WandbSection) and (why := why_missing("wandb")):
            problems.append(f"tracking.to.{index}: wandb does not work here: {why}")
    if problems:
        raise ConfigError(problems)


def _check_env(run: RunConfig) -> None:
    problems: list[str] = []
    for key, section in zip(keys_of(run), run.envs, strict=True):
        try:
            _check_section(run, key, section)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def _check_section(run: RunConfig, key: str, section: EnvSection) -> None:
    """Check one environment, if it is installed here; `key` is the key of its section."""
    if is_served_only(section):
        return
    found: tuple[str, ...] = ()
    try:
        spec = environments.find(section.id)
        _check_needs(run, key, section, spec)
        made = environments.open_env(section.id, Resources.unused(), **section.options)
        found = tasks.splits(spec, section.options)
        tasks.count(spec, section.options, "train", 1)
        if run.evaluation.episodes:
            _check_split(run.evaluation.split, spec, section)
        if not isinstance(made, AsyncEnv):
            made.close()
        if not isinstance(made, AsyncEnv) and not spec.needs:  # `make` has neither sandboxes nor a judge
            with environments.make(section.id) as env:
                # Pass the options to `reset` too, because training does so for each episode.
                _, info = env.reset(seed=0, options={**section.options})
            if policy_kind(run) == "tiny" and not info.get("legal_moves"):
                reason = f"a tiny policy needs a list of legal moves, which {section.id} does not give; name a model"
                raise ConfigError([f"engine.model: {reason}"])
    except UnknownEnvError as error:
        raise ConfigError([f"{key}.id: {error}"]) from None
    except OptionError as error:
        raise ConfigError([f"{key}.options.{error.option}: {error.reason}"]) from None
    except UsageError as error:
        raise ConfigError([f"{key}.options: {error.detail}"]) from None
    except TypeError as error:
        raise ConfigError([f"{key}.options: {section.id} rejects them: {error}"]) from None
    if "split" in section.options and found:
        raise ConfigError([f"{key}.options.split: training and evaluation set the split themselves; leave it out"])


def _check_split(split: str, spec: EnvSpec, section: EnvSection) -> None:
    """Check the split of the evaluation: it exists, and training does not play its tasks."""
    try:
        tasks.count(spec, section.options, split, 1)
    except UsageError as error:
        raise ConfigError([f"evaluation.split: {error.detail}"]) from None
    is_missing = spec.task_set is not None and split not in tasks.splits(spec, section.options)
    if split == "train" or is_missing:  # a missing validation split is the same as train
        raise ConfigError([f"evaluation.split: training plays the tasks of {split}; use a split that it does not play"])


def _check_needs(run: RunConfig, key: str, section: EnvSection, spec: EnvSpec) -> None:
    """Check that the run has what the environment needs, unless a server plays it."""
    problems = []
    if section.url is None and "sandbox" in spec.needs and run.sandbox.kind == "none":
        problems.append(f"sandbox.kind: {section.id} needs sandboxes; use auto, local or docker")
    if section.url is None and "judge" in spec.needs and section.judge is None:
        problems.append(
            f"{key}.judge: {section.id} needs a judge; set MODEL@URL of an endpoint with OpenAI's API, or a model"
        )
    if section.url is None and section.judge is not None and "judge" not in spec.needs:
        problems.append(f"{key}.judge: {section.id} needs no judge; leave it out")
    elif section.judge is not None and ("@" in section.judge or "://" in section.judge):
        try:
            Address.of(section.judge, f"{key}.judge", prefix="")
        except UsageError as error:
            problems.append(str(error))
    elif section.judge is not None and section.judge == run.served_judge:
        try:
            _check_model(section.judge, f"{key}.judge")
        except ConfigError as error:
            problems += error.problems
        served = VllmEngineSection(model=section.judge, python=getattr(run.engine, "python", None))
        problems += [one.replace("engine.model", f"{key}.judge") for one in vllm.problems(served)]
    if spec.needs and policy_kind(run) == "tiny":
        problems.append(f"engine.model: a tiny policy cannot play {section.id}, since it lists no moves; name a model")
    if problems:
        raise ConfigError(problems)


def _check_sandbox(run: RunConfig) -> None:
    if run.sandbox.kind == "local" and (why := why_unavailable()) is not None:
        raise ConfigError([f"sandbox.kind: local does not work here: {why}; use auto or process"])


def _check_engine(run: RunConfig) -> None:
    section = run.engine
    if isinstance(section, TransformersEngineSection):
        _check_device("engine", section.device)
    if isinstance(section, VllmEngineSection) and (found := vllm.problems(section)):
        raise ConfigError(found)
    if section.model is not None:
        _check_model(section.model)
        try:
            if (
                "max_tokens" in run.rollout.model_fields_set and policy_kind(run) == "pretrained"
            ):  # the default is lowered
                check_length(section.model, run.rollout.max_tokens)
            if policy_kind(run) == "pretrained":
                check_room(run.rollout.max_tokens, run.rollout.turn_tokens or TURN_TOKENS)
        except UsageError as error:
            raise ConfigError([error.detail]) from None


def _check_device(section: str, device: str) -> None:
    if device == "cuda":
        from envkit.wiring.training.torch_parts import device_of  # imported late: loads torch, which takes seconds

        try:
            device_of("cuda")
        except UsageError as error:
            raise ConfigError([f"{section}.device: {error.detail}"]) from None


def _check_renderer(run: RunConfig) -> None:
    section = run.renderer
    if policy_kind(run) == "tiny" and isinstance(section, AutoRendererSection) and (keys := section.needing_template):
        raise ConfigError(f"{key}: needs a chat template, which a tiny policy does not have" for key in keys)
    folder = None if run.engine.model is None else folder_of(run.engine.model)
    files = (
        ()
        if folder is None or not isinstance(section, AutoRendererSection)
        else (folder / "chat_template.jinja", folder / "tokenizer_config.json")
    )
    if any(file.is_file() and b"strftime_now" in file.read_bytes() for file in files):
        from envkit.wiring.training.renderer import open_renderer, open_tokenizer  # imported late: takes seconds

        model = Model(str(folder), open_tokenizer(str(folder)))
        open_renderer(RendererContext(section=section, model=model))  # warns if the template calls it


def _check_model(name: str, key: str = "engine.model") -> None:
    try:
        verify(name)
    except UsageError as error:
        raise ConfigError([f"{key}: {error.detail}"]) from None
    if name in CATALOGUE or is_path(name):
        return
    from huggingface_hub import constants  # imported late, because the import is slow
    from huggingface_hub.errors import HFValidationError

    try:
        has_model = is_cached(name)
    except HFValidationError:
        raise ConfigError([f"{key}: {name} is neither a folder here nor a model name of the hub"]) from None
    if constants.HF_HUB_OFFLINE and not has_model:
        raise ConfigError([f"{key}: {name} is not in the hub's cache, and HF_HUB_OFFLINE forbids downloads"])


def _check_algorithm(run: RunConfig) -> None:
    algorithm, whole = Algorithm.of(run.algorithm), run.renderer.history == "all"
    _, max_lag, _ = lag_of(run.rollout)
    if problems := algorithm.problems(group_size=run.rollout.group_size, whole_history=whole, max_lag=max_lag):
        raise ConfigError(problems)
    if run.algorithm.reference is not None:
        _check_model(run.algorithm.reference, "algorithm.reference")


def _check_rollout(run: RunConfig) -> None:
    section, (ahead, max_lag, policy) = run.rollout, lag_of(run.rollout)
    problems = []
    if max_lag < ahead:
        reason = f"must be at least rollout.ahead, which is {ahead}, or no batch could be in time"
        problems.append(f"rollout.max_lag: {reason}; got {max_lag}")
    if max_lag and not ahead and not section.filters:
        problems.append("rollout.max_lag: no token is old while rollout.ahead is 0; leave it out, or set ahead")
    if not ahead and policy is not LagPolicy.WAIT:
        problems.append("rollout.lag_policy: no token is old while rollout.ahead is 0; leave it out, or set ahead")
    try:
        schedule = replay_of(run)
        if schedule is not None and run.trainer.steps > (last := max(schedule, default=0)):
            reason = f"{section.replay_schedule} has the groups of {last} train steps"
            problems.append(f"rollout.replay_schedule: {reason}; set trainer.steps to at most {last}")
    except UsageError as error:
        problems.append(error.detail)
    if problems:
        raise ConfigError(problems)


def _check_agent(run: RunConfig) -> None:
    if run.agent is None:
        return
    problems = check_agent(run.agent, run.renderer)
    if run.rollout.on_hang == "fail":
        problems.append("rollout.on_hang: the actions of an agent cannot be played again; use void")
    if run.engine.model is None:
        problems.append("agent: an agent calls a model with a chat template; name one with engine.model")
    if run.envs[0].url is not None and run.agent.command and run.agent.place == "sandbox":
        problems.append("agent.place: the sandboxes of a server at env.url are out of reach; use beside")
    if problems:
        raise ConfigError(problems)


def _check_trainer(run: RunConfig) -> None:
    if isinstance(run.trainer, TorchTrainerSection):
        _check_device("trainer", run.trainer.device)
    if policy_kind(run) == "tiny" and _has_lora(run):
        reason = "a tiny policy is trained as a whole; use null, or name a model in engine.model"
        raise ConfigError([f"trainer.lora: {reason}"])


def _check_placement(run: RunConfig) -> None:
    """Check the device map, if this machine is all that it names: the nodes of a cluster are known when the run starts.

    A broken engine.python is the subject of `_check_engine`.
    """
    if run.placement.launcher == "local":
        with suppress(UsageError):
            place_run(run, [this_node()])


def _check_imitation(run: RunConfig) -> None:
    section = run.imitation
    if section.kind == "dialogues":
        if policy_kind(run) == "tiny":
            raise ConfigError(["imitation.kind: dialogues need a model with a chat template; name one in engine.model"])
        if section.file is None or not Path(section.file).is_file():
            raise ConfigError([f"imitation.file: must name a file of dialogues as JSON lines, got {section.file}"])
        try:
            parse_dialogues(Path(section.file))
        except UsageError as error:
            raise ConfigError([error.detail]) from None
    elif section.file is not None:
        raise ConfigError([f"imitation.file: needs imitation.kind: dialogues, got {section.kind}; or leave it out"])
    if section.kind == "none" and creates_policy(run):
        raise ConfigError(["imitation.kind: a new tiny policy needs demonstrations; use auto, or name an engine.model"])
    demonstrates = section.kind == "demonstrations" or (section.kind == "auto" and policy_kind(run) == "tiny")
    known = {spec.id: spec for spec in environments.registered()}
    lacking = [one.id for one in run.envs if one.id in known and known[one.id].expert is None]
    if demonstrates and lacking:
        reason = f"{lacking[0]} has no expert to demonstrate; use none, and set engine.model"
        raise ConfigError([f"imitation.kind: {reason}"])
