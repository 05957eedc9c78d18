"""Evaluation of language models in this process: checkpoints of envkit, and other models for transformers."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from envkit import clock, config
from envkit.config import EvalConfig, RunConfig, grammar
from envkit.config.parts import TransformersEngineSection
from envkit.errors import ConfigError, UsageError
from envkit.trainer_bridge.models.catalogue import is_model
from envkit.trainer_bridge.models.saved_policy import SavedPolicy
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.run_folder.record import CONFIG, refuse_other_format
from envkit.types import JSON, Options
from envkit.wiring.contexts import Model
from envkit.wiring.evaluation.contestant import AT_ONCE, Contestant, FoundPolicy, num_envs
from envkit.wiring.training.agents import check_agent, open_player
from envkit.wiring.training.models import check_tokens, locate
from envkit.wiring.training.policy import open_engine, open_renderer
from envkit.wiring.training.resolve import limits_of, policy_kind, resolve

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".json", ".jinja")


def find_local(evaluation: EvalConfig, kind: str, name: str) -> FoundPolicy:
    """Find a model by its folder, file or name (`kind` ``"model"``), or the newest checkpoint of a run.

    A checkpoint plays with the settings of its run, its agent included, and a model with the defaults of training
    files, except for the keys that `evaluation` sets.
    """
    if kind == "model":
        path = locate(name)
        rollout = evaluation.rollout.model_dump(mode="json", include={"step_timeout_s", "retries"})
        content = {"env": {"id": evaluation.env.id}, "engine": {"model": name}, "rollout": rollout}
        run = _run(content, evaluation)
        at_once = AT_ONCE
    else:
        path, content = _checkpoint(Path(name))
        run = _run(content, evaluation)
        at_once = run.num_envs
    if run.agent is not None and (problems := check_agent(run.agent, run.renderer)):
        raise ConfigError(problems)
    options = next((section.options for section in run.envs if section.id == evaluation.env.id), {})
    limits = limits_of(run.rollout)
    if policy_kind(run) == "pretrained":
        is_longer = "max_tokens" in evaluation.rollout.model_fields_set
        check_tokens(run.engine.model if is_longer else None, limits.max_tokens, limits.turn_tokens)
    is_set = "temperature" in evaluation.rollout.model_fields_set
    return FoundPolicy(
        partial(_open, run, path),
        limits,
        num_envs(evaluation) or at_once,
        options,
        temperature=evaluation.rollout.temperature if is_set else run.rollout.temperature,
        identity=_identity(Path(path)),
        warning=_mismatch(run, path, evaluation.env.id),
        agent=run.agent,
    )


def _run(content: Mapping[str, Any], evaluation: EvalConfig) -> RunConfig:
    """Return the training file `content` with the keys that `evaluation` sets for the policy."""
    changed = copy.deepcopy(dict(content))
    for section in ("rollout", "renderer", "engine"):
        for key, value in evaluation.set_keys(section).items():
            if key != "temperature":  # 0 is for evaluations only
                grammar.put(changed, f"{section}.{key}", value)
    if evaluation.agent is not None:
        changed["agent"] = evaluation.agent.model_dump(mode="json")
    return resolve(config.parse(changed))


def _checkpoint(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the policy of a checkpoint, or of the newest one of a run, and the content of the run's training file."""
    found = checkpoint.latest(folder / "checkpoints") if (folder / "checkpoints").is_dir() else folder
    if not is_model(found / "policy"):
        raise UsageError(f"{folder}: neither a run's folder nor a checkpoint; name a run, such as runs/NAME")
    refuse_other_format(found.parent.parent)
    content = grammar.content_of(found.parent.parent / CONFIG, example="env: {id: Sokoban-v0}")
    engine, path = content["engine"], str(found / "policy")
    content.pop("placement", None)  # that of the run's servers
    # Load all weights from the checkpoint, because the model that the run started from may have been deleted.
    if engine["kind"] == "vllm":  # its servers may have other weights by now
        content["engine"] = {"kind": "transformers", "model": path}
    elif engine.get("model") is not None:
        content["engine"] = {**engine, "model": path}
    return path, content


def _identity(path: Path) -> str:
    """Return a fingerprint of the model's files; empty if the model is on the hub."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [(one.name, one.stat()) for one in files if one.suffix in _WEIGHTS and one.is_file()]
    digest = hashlib.sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]).encode())
    return f"{path} {digest.hexdigest()[:16]}" if found else ""


def _mismatch(run: RunConfig, path: str, env_id: str) -> str:
    """Return a warning if the policy was trained on another environment, otherwise an empty string."""
    saved, limits = SavedPolicy.read(Path(path)), limits_of(run.rollout)
    trained_on = [section.id for section in run.envs] if saved is None else saved.env_ids
    if env_id in trained_on:
        return ""
    return (
        f"warning: the policy was trained on {', '.join(trained_on)} and plays {env_id} with rollout.max_turns "
        f"{limits.max_turns}, rollout.max_tokens {limits.max_tokens} and rollout.turn_tokens {limits.turn_tokens}"
    )


@asynccontextmanager
async def _open(run: RunConfig, path: str, options: Options) -> AsyncIterator[Contestant]:
    """Load the model and yield its player."""
    from envkit.wiring.training.torch_parts import find_model

    async with AsyncExitStack() as parts:
        model = await clock.to_thread(partial(find_model, path, policy_kind(run)))
        renderer = await open_renderer(parts, run, model)
        engine = await open_engine(parts, run, model)
        announce = partial(print, file=sys.stderr)
        opening = open_player(run.agent, engine, renderer, limits_of(run.rollout), announce)
        player = await parts.enter_async_context(opening)
        yield Contestant(player, renderer.text, _facts(run, model))


def _facts(run: RunConfig, model: Model) -> dict[str, JSON]:
    template = getattr(model.tokenizer, "chat_template", None) or ""
    engine = run.engine.kind
    package = "transformers" if isinstance(run.engine, TransformersEngineSection) else engine
    with suppress(ImportError):  # a package of another name
        engine = f"{engine} {version(package)}"
    return {
        "engine": engine,
        "dtype": getattr(run.engine, "dtype", None),
        "chat_template": hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else None,
        "renderer": run.renderer.model_dump(mode="json"),
    }
