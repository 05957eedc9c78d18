"""The schema of an evaluation file, in the grammar of training files, and the short names of its keys.

``envkit eval FILE``, ``envkit eval ENV --policy POLICY --set KEY=VALUE`` and `envkit.evaluate` describe an evaluation
with the same keys.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SerializeAsAny

from envkit.config import grammar
from envkit.config.grammar import Count, Seconds, Section
from envkit.config.kinds import ByKind
from envkit.config.parts import (
    AgentSection,
    AutoRendererSection,
    BuiltInSandboxSection,
    EngineSection,
    RendererSection,
    SandboxSection,
    TransformersEngineSection,
)
from envkit.config.training import EnvSection, EvaluationSection, RolloutSection
from envkit.errors import ConfigError, UsageError, did_you_mean
from envkit.shorthands import SHORTHANDS

TRAINING_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("env.weight", "env.outage_timeout_s", "evaluation.every"), "leave it out"),
    **dict.fromkeys(("sandbox.count", "sandbox.liveness", "sandbox.restarts"), "leave it out"),
    "rollout.group_size": "use evaluation.attempts",
}
"""Keys of the sections below that only training uses, with what to do instead. An evaluation refuses them."""


class EvalRolloutSection(RolloutSection):
    """Limits and sampling of the episodes. For a checkpoint, keys that are not set have the values of its run."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature of a language model; 0 always takes the most likely token."""
    turn_tokens: Count | None = None
    """Maximum number of tokens of a completion. null: 4096 for an endpoint, that of the run for a checkpoint, otherwise
    128."""
    step_timeout_s: Seconds = 600.0
    """Maximum seconds that a step may take. If one takes longer, the episode is void."""
    retries: Annotated[int, Field(ge=0)] = 0
    """Maximum number of times that a void episode is played again."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of each request to an endpoint (openai:), such as reasoning_effort; null leaves a parameter
    out, such as seed."""


class EvalConfig(Section):
    """An evaluation file."""

    env: EnvSection
    policy: str
    """random, expert, model:NAME-OR-PATH (a language model in this process), checkpoint:DIR (a training run),
    openai:MODEL@URL (an OpenAI-compatible server), agent:NAME (a foreign agent that is a function, with the language
    model of engine.model; NAME as in agent.function), a player of the environment such as oracle or nop, or NAME or
    NAME:TEXT for a player of a package."""
    agent: AgentSection | None = None
    evaluation: EvaluationSection = EvaluationSection()
    rollout: EvalRolloutSection = EvalRolloutSection()
    engine: SerializeAsAny[Annotated[EngineSection, ByKind("engines", "transformers")]] = TransformersEngineSection()
    renderer: SerializeAsAny[Annotated[RendererSection, ByKind("renderers", "auto")]] = AutoRendererSection()
    sandbox: SerializeAsAny[Annotated[SandboxSection, ByKind("sandboxes", "auto")]] = BuiltInSandboxSection()

    def set_keys(self, name: str) -> dict[str, Any]:
        """Return the keys of the section `name` that were set, with their values."""
        section: Section = getattr(self, name)
        kind = getattr(section, "kind", "auto")
        other = {} if kind in ("auto", "transformers") else {"kind": kind}
        return {**other, **section.model_dump(mode="json", exclude_unset=True)}


def parse(content: Mapping[str, Any], overrides: Sequence[str] = (), **settings: Any) -> EvalConfig:
    """Check a mapping against the schema.

    Args:
        content: The content of an evaluation file.
        overrides: ``"a.b=value"`` strings; the values are parsed as YAML.
        settings: Values by short names; None sets nothing. ``greedy=True`` stands for ``temperature=0``.

    Raises:
        ConfigError: The mapping is invalid. The error has one line per problem, starting with the key.
        UsageError: There is no such short name, or the policy is missing.
    """
    if isinstance(content.get("env"), list):
        raise ConfigError(["env: is a list, but an evaluation plays one environment; write one file for each"])
    changed = copy.deepcopy(dict(content))
    known = {name: one.key for name, one in SHORTHANDS.items()}
    known |= {"options": "env.options", "parameters": "rollout.parameters"}
    if (is_greedy := settings.pop("greedy", False)) and settings.get("temperature") is None:
        settings["temperature"] = 0.0
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"there is no setting {name!r}{did_you_mean(name, known)}; for other keys, use overrides")
        if value is not None:
            if isinstance(value, Mapping):
                for key, one in value.items():
                    grammar.put(changed, f"{known[name]}.{key}", one)
            else:
                grammar.put(changed, known[name], value)
    grammar.override(changed, overrides)
    checked = grammar.check(changed, EvalConfig)
    if is_greedy and checked.rollout.temperature > 0:
        raise UsageError("greedy play does not sample; leave out greedy or temperature")
    return checked


def read(
    config: str | os.PathLike[str] | Mapping[str, Any] | EvalConfig, overrides: Sequence[str] = (), **settings: Any
) -> EvalConfig:
    """Return the evaluation that a file, its content, or the id of an environment describes; see `parse`."""
    if isinstance(config, EvalConfig):
        if not overrides and all(value is None for value in settings.values()):
            return config
        parts = {name: config.set_keys(name) for name in ("engine", "renderer", "sandbox")}
        config = {**config.model_dump(exclude_unset=True), **{name: part for name, part in parts.items() if part}}
    if isinstance(config, Mapping):
        return parse(config, overrides, **settings)
    if (path := Path(config)).suffix in (".yaml", ".yml") or path.is_file():
        return parse(grammar.content_of(path, example="env: {id: Sokoban-v0}"), overrides, **settings)
    if settings.get("policy") is None and not any(one.startswith("policy=") for one in overrides):
        examples = "random, expert or model:smollm2-135m"
        raise ConfigError([f'policy: missing; name one, such as {examples} (--policy NAME, or policy="NAME")'])
    content: dict[str, Any] = {"env": {"id": os.fspath(config)}}
    return parse(content, overrides, **settings)
