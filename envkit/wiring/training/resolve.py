"""What the values of a training file stand for: those that depend on others, the algorithm, the bounds, the tasks."""

from __future__ import annotations

from envkit.config import RunConfig
from envkit.registry import EnvSpec
from envkit.trainer_bridge.algorithms import catalogue
from envkit.trainer_bridge.algorithms.catalogue import Algorithm
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.types import Task, stable_hash
from envkit.wiring import environments


def resolve(run: RunConfig) -> RunConfig:
    """Fill in what depends on other keys: a tiny policy reads the tersest observations and answers in one token."""
    spec = environments.find(run.env.id)
    is_tiny = run.engine.model is None
    options = {**(spec.terse if is_tiny else {}), **run.env.options}
    turn_tokens = run.rollout.turn_tokens or (1 if is_tiny else 128)
    kind = run.warmup.kind if run.warmup.kind != "auto" else "demonstrations" if is_tiny else "none"
    changed = {
        "env": run.env.model_copy(update={"options": options}),
        "rollout": run.rollout.model_copy(update={"turn_tokens": turn_tokens}),
        "warmup": run.warmup.model_copy(update={"kind": kind}),
    }
    return run.model_copy(update=changed)


def algorithm_of(run: RunConfig) -> Algorithm:
    """Return the algorithm that the file asks for."""
    return catalogue.resolve(run.algorithm.preset, run.algorithm.model_dump(exclude={"preset"}))


def limits_of(run: RunConfig) -> RolloutLimits:
    """Return what bounds an episode."""
    section = run.rollout
    assert section.turn_tokens is not None, "resolve fills it in"
    return RolloutLimits(
        max_turns=section.max_turns,
        max_tokens=section.max_tokens,
        turn_tokens=section.turn_tokens,
        timeout_s=section.timeout_s,
        retries=section.retries,
    )


def task_of(run: RunConfig, spec: EnvSpec, split: str, seed: int, number: int) -> Task:
    """Return the task of a number in a split: the same one in every process."""
    options = {**run.env.options}
    if split in spec.splits:
        options["split"] = split
    return Task(run.env.id, stable_hash(seed, split, number) >> 33, options)
