"""Values derived from a training file: episode limits, tasks, and defaults that depend on other keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

from envkit.config import ImitationSection, RunConfig, kinds
from envkit.config.grammar import Section
from envkit.config.parts import (
    LoraSection,
    RendererSection,
    TorchTrainerSection,
    TransformersEngineSection,
    VllmEngineSection,
)
from envkit.config.training import EnvSection, RolloutSection, TrainRolloutSection
from envkit.errors import ConfigError, UsageError
from envkit.registry import EnvSpec
from envkit.runs.files import read_rows
from envkit.trainer_bridge.algorithms.algorithm import Algorithm
from envkit.trainer_bridge.models.catalogue import CATALOGUE
from envkit.trainer_bridge.models.saved_policy import SavedPolicy
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.trainer_bridge.run_folder.record import SCHEDULE
from envkit.trainer_bridge.scheduler.cursor import Schedule, read_schedule
from envkit.trainer_bridge.scheduler.pace import LagPolicy, Pace
from envkit.wiring import environments
from envkit.wiring.contexts import PolicyKind
from envkit.wiring.environments import refuse_foreign
from envkit.wiring.training import models

_IMITATION: Mapping[str, tuple[float, float]] = {
    "updates": (600, 130),
    "batch": (256, 32),
    "states": (30_000, 4096),
    "learning_rate": (4e-3, 5e-5),
    "check_episodes": (256, 0),
}
"""Defaults of imitation: of a tiny policy, and of a pretrained one."""
_LORA_IMITATION_RATE = 2e-4
_DIALOGUE_BATCH = 16

LORA_FROM = 7e9
"""Parameters from which LoRA is the default: all weights of such a model need 16 bytes for each parameter."""

_ASYNCHRONOUS_LAG = 4
"""Default of `rollout.max_lag` with `rollout.asynchronous`."""

_T = TypeVar("_T")

TURN_TOKENS = 128
"""Default maximum length of an answer of a pretrained model, in tokens."""
_TOOL_RESET_S = 600.0
"""Default timeout of a reset that may wait for a sandbox."""


AGENT_TIMEOUT_S = 3600.0
"""Maximum seconds that a foreign agent may take by default: a program may wait for ever."""


def resolve(run: RunConfig) -> RunConfig:
    """Return `run` with the defaults that depend on other keys, such as one token per answer of a tiny policy.

    If `engine.model` is the folder of a policy that envkit saved for the same environment, the environment options, the
    renderer and the tokens per turn default to the values with which that policy was trained.

    Raises:
        ConfigError: The policy file in the folder `engine.model` is damaged or has an unknown format.
        UsageError: That file sets an option that only the user may set.
    """
    kind = policy_kind(run)
    tiny = kind == "tiny"
    saved = _saved_policy(run)
    if saved is None or all(saved.options_for(section.id) is None for section in run.envs):
        saved = SavedPolicy(tiny, "", {})
    envs: list[EnvSection] = []
    for section, spec in zip(run.envs, specs_of(run), strict=True):
        refuse_foreign(
            section.id,
            saved.options_for(section.id) or {},
            section.options,
            f"the policy {run.engine.model}",
            flag="--set env.options.",
        )
        defaults = {**(spec.compact_options if tiny else {}), **(saved.options_for(section.id) or {})}
        envs.append(section.model_copy(update={"options": {**defaults, **section.options}}))
    turn_tokens = run.rollout.turn_tokens or saved.turn_tokens or (1 if tiny else TURN_TOKENS)
    max_tokens = run.rollout.max_tokens
    if "max_tokens" not in run.rollout.model_fields_set and not tiny:
        max_tokens = min(max_tokens, _known(models.positions_of, run) or max_tokens)
    trainer, engine = run.trainer, run.engine
    if isinstance(trainer, TorchTrainerSection):
        lora = default_lora(run)
        trainer = _trainer_defaults(
            trainer if lora is None else trainer.model_copy(update={"lora": lora}), is_tiny=tiny
        )
    if isinstance(engine, (TransformersEngineSection, VllmEngineSection)) and engine.dtype == "auto":
        device = engine.device if isinstance(engine, TransformersEngineSection) else "auto"
        dtype = "float32" if tiny or not has_fast_bfloat16(device) else "bfloat16"
        engine = engine.model_copy(update={"dtype": dtype})
    rollout: dict[str, float | str | None] = {"turn_tokens": turn_tokens, "max_tokens": max_tokens}
    if run.agent is not None:
        rollout["player_timeout_s"] = run.rollout.player_timeout_s or AGENT_TIMEOUT_S
    rollout["reset_timeout_s"] = reset_timeout_s(run.rollout, specs_of(run))
    rollout["ahead"], rollout["max_lag"], policy = lag_of(run.rollout)
    rollout["lag_policy"] = policy.value
    changed: dict[str, Section | list[EnvSection]] = {
        "env": envs if isinstance(run.env, list) else envs[0],
        "trainer": trainer,
        "renderer": _renderer(run.renderer, saved.renderer),
        "engine": engine,
        "rollout": run.rollout.model_copy(update=rollout),
    }
    changed["imitation"] = _imitation(run.model_copy(update=changed), kind)
    return run.model_copy(update=changed)


def default_lora(run: RunConfig) -> LoraSection | None:
    """Return the adapter that a run trains because its model is large and the file does not set `trainer.lora`."""
    is_open = isinstance(run.trainer, TorchTrainerSection) and "lora" not in run.trainer.model_fields_set
    return LoraSection() if is_open and (parameters(run) or 0) >= LORA_FROM else None


def parameters(run: RunConfig) -> int | None:
    """Return about how many parameters the model of a run has; None if it is not known."""
    return _known(models.parameters_of, run)


def _known(find: Callable[[str], int | None], run: RunConfig) -> int | None:
    """Return what `find` returns for the model; None for a name that is not valid, which the checks report."""
    from huggingface_hub.errors import HFValidationError  # imported late, because the import is slow

    try:
        return None if run.engine.model is None else find(run.engine.model)
    except (HFValidationError, UsageError):
        return None


def spec_of(section: EnvSection) -> EnvSpec:
    """Return the registered environment of a section. If only the server of its `url` has it, its splits are unknown.

    Raises:
        UnknownEnvError: The environment is not registered, and there is no server.
    """
    return EnvSpec(section.id, "") if is_served_only(section) else environments.find(section.id)


def is_served_only(section: EnvSection) -> bool:
    """Whether the environment is not registered in this process, so that only the server of its `url` can have it."""
    return section.url is not None and all(spec.id != section.id for spec in environments.registered())


def _renderer(section: RendererSection, saved: Mapping[str, Any]) -> RendererSection:
    """Return the `renderer` section. Keys that are not set have the saved values, unless a kind is set that differs."""
    stated, kind = section.model_dump(exclude_unset=True), saved.get("kind", "auto")
    if stated.get("kind", kind) != kind:
        return section
    found: RendererSection = kinds.find("renderers", kind).section.model_validate({**saved, **stated})
    return found


def creates_policy(run: RunConfig) -> bool:
    """Whether the run creates a tiny policy."""
    return run.engine.model is None and isinstance(run.engine, TransformersEngineSection)


def policy_kind(run: RunConfig) -> PolicyKind:
    """Return ``"tiny"`` if the run creates its policy, or `engine.model` is the folder of a tiny policy of envkit."""
    saved = None if creates_policy(run) else _saved_policy(run)
    return "tiny" if creates_policy(run) or (saved is not None and saved.tiny) else "pretrained"


def _saved_policy(run: RunConfig) -> SavedPolicy | None:
    """Return the content of the policy file in the folder `engine.model`; None if there is no such folder or file."""
    name = run.engine.model
    if name is None or name in CATALOGUE:
        return None
    try:
        return SavedPolicy.read(Path(name))
    except UsageError as error:
        raise ConfigError([f"engine.model: {error.detail}"]) from None


def _imitation(run: RunConfig, policy: PolicyKind) -> ImitationSection:
    """Return the section `imitation` with the defaults that depend on other keys and on the kind of policy."""
    section, is_tiny = run.imitation, policy == "tiny"
    kind = section.kind if section.kind != "auto" else "demonstrations" if is_tiny else "none"
    usual: dict[str, float] = {key: tiny if is_tiny else pretrained for key, (tiny, pretrained) in _IMITATION.items()}
    if getattr(run.trainer, "lora", None) is not None:
        usual["learning_rate"] = _LORA_IMITATION_RATE
    if kind == "dialogues":
        usual["batch"] = _DIALOGUE_BATCH
        del usual["updates"]  # one pass over the file
    given = {key: value for key, value in usual.items() if getattr(section, key) is None}
    return section.model_copy(update={"kind": kind, **given})


def filled(value: _T | None) -> _T:
    """Return `value`, the value of an optional key, for which `resolve` has set a default."""
    assert value is not None, "resolve fills it in"
    return value


def uses_gpu(device: str, *, machine: Path = Path("/")) -> bool:
    """Return whether `device` is a GPU: ``"cuda"``, or ``"auto"`` on a machine that has one."""
    return device == "cuda" or (device == "auto" and (machine / "dev/nvidiactl").exists())


def has_fast_bfloat16(device: str, *, machine: Path = Path("/")) -> bool:
    """Return whether `device` multiplies bfloat16 matrices faster than float32 matrices.

    A processor without instructions for bfloat16 is several times slower with it: 5 to 14 times on an AVX2 processor.
    `machine` is the root folder, with the kernel's lists of devices and processor flags.
    """
    if uses_gpu(device, machine=machine):
        return True
    try:
        flags = (machine / "proc/cpuinfo").read_text().split()
    except OSError:  # not Linux
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _trainer_defaults(section: TorchTrainerSection, *, is_tiny: bool) -> TorchTrainerSection:
    """Return the trainer's settings with the defaults that depend on whether the policy is tiny."""
    lora = section.lora
    precision = section.precision
    if precision == "auto":
        precision = "float32" if is_tiny or not has_fast_bfloat16(section.device) else "bfloat16"
    defaults: dict[str, object] = {
        "learning_rate": 5e-4 if is_tiny else 1e-6 if lora is None else 2e-5,
        "critic_learning_rate": 1e-3 if is_tiny else 1e-5 if lora is None else 1e-4,
        "precision": precision,
        "gradient_checkpointing": not is_tiny,
        "micro_tokens": 16384 if is_tiny else 4096,
    }
    open_keys = {key: value for key, value in defaults.items() if getattr(section, key) in (None, "auto")}
    return section.model_copy(update=open_keys)


def limits_of(section: RolloutSection) -> RolloutLimits:
    """Return the limits of one episode. In a training file, the section must come from `resolve`."""
    limits = {one.name: getattr(section, one.name) for one in fields(RolloutLimits)}
    return RolloutLimits(**{**limits, "turn_tokens": section.turn_tokens or TURN_TOKENS})


def lag_of(section: TrainRolloutSection) -> tuple[int, int, LagPolicy]:
    """Return `ahead`, `max_lag` and `lag_policy`."""
    is_fast = section.asynchronous == "fast"
    ahead = section.ahead if section.ahead is not None else 2 if is_fast else int(bool(section.asynchronous))
    usual = max(ahead, _ASYNCHRONOUS_LAG) if section.asynchronous else ahead
    policy = section.lag_policy or (LagPolicy.RESUME if is_fast else LagPolicy.WAIT)
    return ahead, usual if section.max_lag is None else section.max_lag, LagPolicy(policy)


def pace_of(run: RunConfig) -> Pace:
    """Return how far the episodes of a run are ahead of its trainer. The sections must come from `resolve`."""
    section = run.rollout
    compares = "groups" in Algorithm.of(run.algorithm).needs and section.group_size > 1
    return Pace(
        steps=run.trainer.steps,
        groups_per_step=run.trainer.groups_per_step,
        group_size=section.group_size,
        group_extra=section.group_extra,
        least=2 if compares else 1,
        ahead=filled(section.ahead),
        max_lag=filled(section.max_lag),
        lag_policy=LagPolicy(filled(section.lag_policy)),
        straggler=section.straggler,
        fails_hangs=section.on_hang == "fail",
        filters=[kinds.find("filters", one.kind).open(one) for one in section.filters],
        max_filtered=section.max_filtered,
        temperature=section.temperature,
        seed=run.seed,
    )


def replay_of(run: RunConfig) -> Schedule | None:
    """Return the schedule of the run whose groups are played again; None without one.

    Raises:
        UsageError: The folder has no schedule, or it is damaged.
    """
    if (folder := run.rollout.replay_schedule) is None:
        return None
    path = Path(folder) / SCHEDULE
    if not path.is_file():
        raise UsageError(f"{folder} has no {SCHEDULE}; name the folder of a training run")
    return read_schedule(read_rows(path))


def specs_of(run: RunConfig) -> list[EnvSpec]:
    """Return the environment of each section of `run.envs`; see `spec_of`."""
    return [spec_of(section) for section in run.envs]


def reset_timeout_s(rollout: RolloutSection, specs: Iterable[EnvSpec]) -> float | None:
    """Return the maximum seconds of a reset, which is long by default if an environment's reset waits for a sandbox."""
    is_slow = rollout.reset_timeout_s is None and any(spec.needs for spec in specs)
    return _TOOL_RESET_S if is_slow else rollout.reset_timeout_s


def keys_of(run: RunConfig) -> list[str]:
    """Return the key of each section of `run.envs`: ``env``, or ``env.INDEX`` in a list."""
    return [f"env.{index}" for index in range(len(run.env))] if isinstance(run.env, list) else ["env"]


def names_of(run: RunConfig) -> list[str]:
    """Return a unique name for each section of `run.envs`: its id, or ``ID.INDEX`` if the id occurs several times."""
    counts = Counter(section.id for section in run.envs)
    return [one.id if counts[one.id] == 1 else f"{one.id}.{index}" for index, one in enumerate(run.envs)]


def parts_of(run: RunConfig, total: int) -> list[int]:
    """Divide `total`, such as a number of demonstrations, among the sections of `run.envs` by their weights."""
    bounds = list(accumulate((section.weight for section in run.envs), initial=0.0))
    ends = [round(total * bound / bounds[-1]) for bound in bounds]
    return [end - first for first, end in pairwise(ends)]
