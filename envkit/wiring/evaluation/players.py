"""Policies by name: finds the kind of a policy, and opens the players that need no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from envkit.config import kinds
from envkit.errors import UsageError, did_you_mean
from envkit.protocols import Player
from envkit.registry import EnvSpec
from envkit.trainer_bridge.rollout.players import ExpertPlayer, NopPlayer, RandomPlayer
from envkit.types import JSON, EpisodeRecord, Options
from envkit.wiring.environments import find, open_expert, open_helper, registered

MAX_SESSIONS = 256
"""Maximum number of concurrent episodes on a server; the server's capacity may be lower."""
MAX_TURNS = 10_000
"""Default number of turns after which an episode is cut off, because an environment may set no limit itself."""

ANY_SPLIT = "any"
"""Selects the levels of all splits."""

NOP = "nop"
"""The player that plays an empty action in each turn, unless the environment has a player of this name."""

POLICIES = ("random", "expert", "model:NAME-OR-PATH", "openai:MODEL@URL", "mini_swe:MODEL@URL", "checkpoint:DIR")
"""The built-in policies."""

OnEpisode = Callable[[EpisodeRecord], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Playing:
    """Settings for a language model that plays. None means the default for its kind of policy.

    Attributes:
        system: System prompt.
        turn_tokens: Maximum tokens of one answer.
        max_turns: Turns after which an episode is cut off.
        max_tokens: Maximum tokens of a prompt plus its answer. If the next prompt is too long, the episode is cut off.
        temperature: Sampling temperature; 0 is greedy.
        history: Number of most recent turns in a prompt, or ``"all"``.
        thinking: Whether thoughts of earlier turns stay in the prompt (``"keep"``) or are cut (``"cut"``).
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``, for a model in this process.
        batch: Number of concurrent episodes of a model in this process.
        concurrency: Number of concurrent requests to an endpoint.
    """

    system: str | None = None
    turn_tokens: int | None = None
    max_turns: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    history: int | Literal["all"] | None = None
    thinking: Literal["keep", "cut"] | None = None
    device: Literal["auto", "cpu", "cuda"] | None = None
    batch: int | None = None
    concurrency: int | None = None

    def arguments(self) -> dict[str, JSON]:
        """Return those settings that must not change when an evaluation is resumed, without any that are None."""
        names = ("system", "turn_tokens", "max_turns", "max_tokens", "temperature", "history", "thinking")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check(self, kind: str) -> None:
        """Check that all settings that are not None apply to policies of `kind`, such as ``"openai"``.

        Raises:
            UsageError: A setting does not apply to policies of this kind.
        """
        for name, allowing in _KINDS.items():
            if getattr(self, name) is not None and kind not in allowing:
                option, allowed = name.replace("_", "-"), " or ".join(f"{one}:..." for one in allowing)
                raise UsageError(f"--{option} needs --policy {allowed}; leave it out with {kind}")


_KINDS = {
    **dict.fromkeys(("turn_tokens", "max_turns", "temperature"), ("model", "checkpoint", "openai", "mini_swe")),
    **dict.fromkeys(("system", "history", "thinking"), ("model", "checkpoint", "openai")),
    "concurrency": ("openai", "mini_swe"),
    **dict.fromkeys(("max_tokens", "device", "batch"), ("model", "checkpoint")),
}
"""For each setting of `Playing`, the kinds of policies that it applies to."""


def spec_of(env_id: str, url: str | None) -> EnvSpec | None:
    """Return the registered spec of `env_id`; None for an environment that only the server at `url` knows.

    Raises:
        UnknownEnvError: There is no such environment, and `url` is None.
    """
    return None if url is not None and all(one.id != env_id for one in registered()) else find(env_id)


def with_split(options: Options, split: str, splits: Sequence[str]) -> Options:
    """Return `options` plus the option ``split``, unless `split` is ``"any"`` or the environment has no `splits`.

    Raises:
        UsageError: The environment has no such split.
    """
    if splits and split not in (*splits, ANY_SPLIT):
        raise UsageError(f"--split: there is no {split!r}{did_you_mean(split, [*splits, ANY_SPLIT])}")
    return {**options, "split": split} if split in splits else options


def kind_of(policy: str, spec: EnvSpec | None = None) -> tuple[str, str]:
    """Return the kind and name of a policy, such as ``("model", "smollm2-135m")``; the name of others may be empty.

    The kind of a player of the environment, such as ``oracle`` or ``cheat:skip``, is ``"player"``.

    Raises:
        UsageError: There is no such kind, or the name is missing.
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
        known = [*(f"{one}:" if ":" in forms[one] else one for one in forms), *others]
        of_env = [NOP, *(one for one in (() if spec is None else spec.players) if one != NOP)]
        remedy = ""
        if form is None:
            remedy = did_you_mean(policy, of_env, lists=False) or did_you_mean(kind, known, lists=False)
        all_forms = f"; there are: {', '.join([*POLICIES, *of_env, *others])}"
        raise UsageError(f"--policy: there is no {policy!r}{remedy or all_forms}")
    if ":" in form and not name:
        raise UsageError(f"--policy: {policy} lacks {form.partition(':')[2]} after the colon; write {form}")
    return kind, name


def own_player(name: str, spec: EnvSpec | None, options: Options) -> Player:
    """Return the player `name` of an environment, such as ``oracle``, for episodes with `options`.

    Raises:
        OptionError: The player rejects an option.
    """
    if spec is None or name not in spec.players:
        return NopPlayer()
    player: Player = open_helper(spec, spec.players[name], options)
    return player


def player_for(policy: str, env_id: str, spec: EnvSpec | None, options: Options) -> Player:
    """Return the player for `policy`, which is ``"random"`` or ``"expert"``, and for episodes with `options`.

    `spec` is None for an environment that only a server knows; such an environment has no expert here.

    Raises:
        UsageError: The environment has no expert.
        OptionError: The expert rejects an option.
    """
    expert = None if spec is None or spec.expert is None else open_expert(env_id, options)
    if policy == "random":
        return RandomPlayer(env_id, expert)
    if expert is None:
        raise UsageError(f"--policy: {env_id} has no expert; use another policy")
    return ExpertPlayer(expert, RandomPlayer(env_id, expert))
