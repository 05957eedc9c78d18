"""What is wrong with a training file beyond its grammar."""

from __future__ import annotations

from pathlib import Path

from envkit.config import RunConfig
from envkit.env import AsyncEnv
from envkit.errors import ConfigError, OptionError, UnknownEnvError, UsageError
from envkit.installation import EXTRAS, why_missing
from envkit.sandbox.bubblewrap.backend import why_unavailable
from envkit.sandbox.docker import backend as docker
from envkit.wiring import environments
from envkit.wiring.training.resolve import algorithm_of


def check(run: RunConfig) -> list[str]:
    """Return what is wrong with a configuration beyond its grammar, one line each, starting with the key."""
    problems: list[str] = []
    for examine in (
        _check_packages,
        _check_env,
        _check_sandbox,
        _check_engine,
        _check_renderer,
        _check_algorithm,
        _check_warmup,
    ):
        try:
            examine(run)
        except ConfigError as error:
            problems += error.problems
    return problems


async def check_docker(run: RunConfig) -> list[str]:
    """Return why the Docker sandboxes that `run` asks for cannot start here: the client, the daemon or the image."""
    if run.sandbox.kind != "docker" or (why := await docker.why_unavailable(docker.DEFAULT_IMAGE)) is None:
        return []
    return [f"sandbox.kind: docker cannot work here: {why}; or take auto or process"]


def unverified(run: RunConfig) -> list[str]:
    """Return what `check` cannot know without a network, one line each: whether the hub has the model."""
    name = run.engine.model
    if name is None or _is_path(name) or _is_cached(name):
        return []
    line = f"engine.model: {name} is not in the hub's cache on this machine, so training would download it; "
    return [f"{line}check did not ask the hub whether it exists"]


def _check_packages(run: RunConfig) -> None:
    if why := next(filter(None, map(why_missing, EXTRAS["train"])), None):
        raise ConfigError([f"engine.kind: {run.engine.kind} cannot work here: {why}"])


def _check_env(run: RunConfig) -> None:
    try:
        made = environments.open_world(run.env.id, **run.env.options)
        if not isinstance(made, AsyncEnv):
            made.close()
            with environments.make(run.env.id) as world:
                world.reset(seed=0, options={**run.env.options})  # the way in which tasks bring them
    except UnknownEnvError as error:
        raise ConfigError([f"env.id: {error}"]) from None
    except OptionError as error:
        raise ConfigError([f"env.options.{error.option}: {error.reason}"]) from None
    except TypeError as error:
        raise ConfigError([f"env.options: {run.env.id} refuses them: {error}"]) from None
    if "split" in run.env.options and environments.find(run.env.id).splits:
        raise ConfigError(["env.options.split: is set by the run, which trains on one split and evaluates on another"])


def _check_sandbox(run: RunConfig) -> None:
    if run.sandbox.kind == "local" and (why := why_unavailable()) is not None:
        raise ConfigError([f"sandbox.kind: local cannot work here: {why}; take auto or process"])


def _check_engine(run: RunConfig) -> None:
    section = run.engine
    if section.device == "cuda":
        from envkit.wiring.training.policy import device_of  # takes seconds: torch

        try:
            device_of("cuda")
        except UsageError as error:
            raise ConfigError([error.detail]) from None
    if section.model is None and section.hidden_size % (2 * section.heads):
        raise ConfigError(
            [f"engine.heads: twice {section.heads} must divide engine.hidden_size, which is {section.hidden_size}"]
        )
    if section.model is not None:
        _check_model(section.model)


def _check_renderer(run: RunConfig) -> None:
    if run.engine.model is None and (keys := run.renderer.needing_template):
        raise ConfigError(f"{key}: is for models with a chat template, and a tiny policy has none" for key in keys)


def _check_model(name: str) -> None:
    if _is_path(name):
        if not (Path(name).expanduser() / "config.json").is_file():
            raise ConfigError([f"engine.model: {name} is no model folder (it has no config.json)"])
        return
    from huggingface_hub import constants  # takes a moment
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = _is_cached(name)
    except HFValidationError:
        raise ConfigError([f"engine.model: {name} is neither a folder here nor a name of the hub"]) from None
    if constants.HF_HUB_OFFLINE and not is_cached:
        raise ConfigError([f"engine.model: {name} is not in the hub's cache, and HF_HUB_OFFLINE forbids downloads"])


def _is_path(name: str) -> bool:
    """Whether the name of a model means a folder of this machine, which may be missing."""
    path = Path(name).expanduser()
    begins_here = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    return name.startswith((".", "/", "~")) or begins_here or path.exists()


def _is_cached(name: str) -> bool:
    """Whether the hub's cache on this machine holds the model."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _check_algorithm(run: RunConfig) -> None:
    algorithm = algorithm_of(run)
    if algorithm.advantage == "group_normalised" and run.rollout.group_size < 2:
        raise ConfigError(
            [f"rollout.group_size: {run.algorithm.preset} compares the episodes of a group, so it must be at least 2"]
        )
    repeats = {"epochs": algorithm.epochs, "minibatches": algorithm.minibatches}
    if algorithm.loss == "reinforce" and max(repeats.values()) > 1:
        reason = "the reinforce loss is only right for samples of the current policy; take 1, or the clipped loss"
        raise ConfigError(f"algorithm.{key}: {reason}" for key, count in repeats.items() if count > 1)


def _check_warmup(run: RunConfig) -> None:
    if run.warmup.kind == "none" and run.engine.model is None:
        raise ConfigError(["warmup.kind: a tiny policy that knows nothing needs demonstrations"])
    wanted = run.warmup.kind == "demonstrations" or run.engine.model is None
    known = {spec.id: spec for spec in environments.registered()}
    if wanted and run.env.id in known and known[run.env.id].expert is None:
        raise ConfigError([f"warmup.kind: {run.env.id} has no expert to demonstrate; take none and an engine.model"])
