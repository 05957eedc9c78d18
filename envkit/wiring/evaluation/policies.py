"""Policies of evaluations: finds the policy that a name describes, and opens its player."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from envkit import installation
from envkit.config import EvalConfig, kinds
from envkit.config.parts import AgentSection
from envkit.environments.tasks import Nop
from envkit.errors import ConfigError, UsageError, did_you_mean
from envkit.protocols import Player
from envkit.registry import EnvSpec
from envkit.trainer_bridge.models.catalogue import CATALOGUE
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.trainer_bridge.rollout.players import ExpertPlayer, RandomPlayer
from envkit.types import Options
from envkit.wiring.contexts import PlayerContext, open_part
from envkit.wiring.environments import find, open_expert, open_helper, registered
from envkit.wiring.evaluation.contestant import AT_ONCE, Contestant, FoundPolicy, num_envs
from envkit.wiring.training.resolve import limits_of, reset_timeout_s

SLOTS = 256
"""Maximum number of concurrent episodes of a player without a language model."""
MAX_TURNS = 10_000
"""Default number of turns of a player without a language model, because an environment may set no limit itself."""

ENDPOINT_TOKENS = 4096
"""Default maximum number of tokens in an answer of an endpoint: room for thoughts, and for a tool call with a file."""

NOP = "nop"
"""The player that plays an empty action in each turn, unless the environment has a player of this name."""

POLICIES = ("random", "expert", "model:NAME-OR-PATH", "openai:MODEL@URL", "agent:NAME", "checkpoint:DIR")
"""The built-in policies."""

_LOCAL = ("model", "checkpoint", "agent")
_MODELS = (*_LOCAL, "openai")
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "rollout.temperature": _MODELS,
    "rollout.turn_tokens": _MODELS,
    "rollout.max_tokens": _LOCAL,
    "rollout.completion_timeout_s": _LOCAL,
    "rollout.parameters": ("openai",),
    "renderer.system": _MODELS,
    "renderer.history": _MODELS,
    "renderer.thinking": _MODELS,
}
"""For each key that some policies do not have, the kinds of policies that have it."""


def find_policy(config: EvalConfig, spec: EnvSpec | None) -> FoundPolicy:
    """Find a policy, and make those checks of it that do not need its model to be loaded."""
    kind, name = kind_of(config.policy, spec)
    _refuse_needless(config, kind)
    if config.agent is not None and kind not in _LOCAL:
        raise ConfigError(["agent: calls a policy of this process; name it as model:... or checkpoint:..."])
    if kind in _LOCAL:
        installation.load("torch")
        from envkit.wiring.evaluation.local_models import find_local

        if kind == "agent":
            config = _with_agent(config, name)
            kind, _, name = config.policy.partition(":")
        return find_local(config, kind, name)
    reset_s = reset_timeout_s(config.rollout, [] if spec is None else [spec])
    limits = replace(limits_of(config.rollout), max_tokens=sys.maxsize, reset_timeout_s=reset_s)
    if kind in _MODELS:
        return _find_endpoint(config, name, limits)
    if "max_turns" not in config.rollout.model_fields_set:
        limits = replace(limits, max_turns=MAX_TURNS)
    return FoundPolicy(partial(_open_player, kind, name, config.env.id, spec), limits, num_envs(config) or SLOTS)


def _with_agent(config: EvalConfig, name: str) -> EvalConfig:
    """Return an evaluation with the policy ``agent:NAME`` as one with ``model:...`` and a section ``agent``."""
    from envkit.wiring.training.agents import function_of

    section, problems = config.agent or AgentSection(), []
    try:
        function_of(name)
    except UsageError as error:
        problems.append(f"policy: {error}")
    if section.command or section.function not in ("", name):
        problems.append(f"agent: is another agent than that of the policy agent:{name}; leave out one of the two")
    model = config.set_keys("engine").get("model")
    if model is None:
        problems.append("engine.model: missing; name the language model that the agent calls, such as smollm2-135m")
    if problems:
        raise ConfigError(problems)
    agent = section.model_copy(update={"function": name})
    return config.model_copy(update={"policy": f"model:{model}", "agent": agent})


def _refuse_needless(config: EvalConfig, kind: str) -> None:
    """Refuse keys that have no effect with policies of this kind."""
    problems = []
    keys = [f"{name}.{key}" for name in ("rollout", "renderer", "engine") for key in config.set_keys(name)]
    for key in keys:
        allowing = _LOCAL if key.startswith("engine.") else _NEEDS.get(key)
        if allowing is not None and kind not in allowing:
            allowed = " or ".join(f"{one}:..." for one in allowing)
            problems.append(f"{key}: needs the policy {allowed}; leave it out with {kind}")
    if problems:
        raise ConfigError(problems)


def _find_endpoint(config: EvalConfig, name: str, limits: RolloutLimits) -> FoundPolicy:
    installation.load("httpx")
    from envkit.http.client.chat import Address
    from envkit.wiring.evaluation.endpoint import open_endpoint

    address, chosen = Address.of(name), config.rollout
    limits = replace(limits, turn_tokens=chosen.turn_tokens or ENDPOINT_TOKENS)
    at_once = num_envs(config) or AT_ONCE

    @asynccontextmanager
    async def opened(options: Options) -> AsyncIterator[Contestant]:
        async with open_endpoint(address, limits, config.renderer, at_once=at_once) as endpoint:
            endpoint.client.parameters = chosen.parameters
            yield Contestant(endpoint, client=endpoint.client)

    return FoundPolicy(opened, limits, at_once, temperature=chosen.temperature)


@asynccontextmanager
async def _open_player(
    kind: str, name: str, env_id: str, spec: EnvSpec | None, options: Options
) -> AsyncIterator[Contestant]:
    """Open a player without a language model: one of this module, of the environment or of another package."""
    async with AsyncExitStack() as parts:
        if kind in ("player", "random", "expert"):
            yield Contestant(player_of(name or kind, spec, options))
        else:
            context = PlayerContext(name=name, env_id=env_id, options=options)
            yield Contestant(await open_part(parts, "policies", kind, context))


def spec_of(env_id: str, url: str | None) -> EnvSpec | None:
    """Return the registered spec of `env_id`; None for an environment that only the server at `url` knows.

    Raises:
        UnknownEnvError: There is no such environment, and `url` is None.
    """
    return None if url is not None and all(one.id != env_id for one in registered()) else find(env_id)


def kind_of(policy: str, spec: EnvSpec | None = None) -> tuple[str, str]:
    """Return the kind and name of a policy, such as ``("model", "smollm2-135m")``; the name of others may be empty.

    The kind of a player of the environment, such as ``oracle`` or ``cheat:skip``, is ``"player"``.
    """
    if policy == NOP or (spec is not None and policy in spec.players):
        return "player", policy
    kind, _, name = policy.partition(":")
    forms = {one.partition(":")[0]: one for one in POLICIES}
    form = forms.get(kind)
    others = kinds.names("policies") if form is None else []
    if kind in others:
        return kind, name
    if form is None or (name and ":" not in form):
        known = list(dict.fromkeys([*POLICIES, *([NOP] if spec is None else players(spec)), *others]))
        remedy = (
            f"; did you mean 'model:{policy}'?" if policy in CATALOGUE else did_you_mean(policy, known, lists=False)
        )
        raise UsageError(f"policy: there is no {policy!r}{remedy or '; there are: ' + ', '.join(known)}")
    if ":" in form and not name:
        raise UsageError(f"policy: {policy} lacks {form.partition(':')[2]} after the colon; write {form}")
    return kind, name


def players(spec: EnvSpec) -> list[str]:
    """Return the names of the players of an environment."""
    return list(dict.fromkeys(["random", *(["expert"] if spec.expert is not None else []), NOP, *spec.players]))


def player_of(name: str, spec: EnvSpec | None, options: Options) -> Player:
    """Return ``random``, ``expert``, or a player of the environment such as ``oracle``, for episodes with `options`.

    `spec` is None for an environment that only a server knows; it has only ``random`` and ``nop`` here.
    """
    if spec is not None and name in spec.players:
        player: Player = open_helper(spec, spec.players[name], options)
        return player
    if name == NOP:
        return Nop()
    expert = None if spec is None or spec.expert is None else open_expert(spec.id, options)
    if name == "random":
        return RandomPlayer(expert)
    if expert is None:
        raise UsageError("policy: the environment has no expert; use another policy")
    return ExpertPlayer(expert, RandomPlayer(expert))
