"""The table of algorithms. This module does not import torch, so that `envkit check` can use it.

    grpo       as in Shao et al. 2024 (DeepSeekMath): episode returns, normalised over each group; clipped ratio. The
               loss is a mean over tokens (Yu et al. 2025, DAPO), not over sequences, and the discount is per turn.
    reinforce  Williams 1992: turn returns, normalised over the batch (ReBN of GEM, Liu et al. 2025)
    ppo        Schulman et al. 2017: a critic and generalised advantage estimates over turns; clipped ratio

A preset combines an advantage and a loss. Each of these is a `Part`: a function, what it needs, and its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, Literal

from pydantic import ValidationError

from envkit.errors import ConfigError, did_you_mean

Need = Literal["critic", "groups", "on_policy"]


@dataclass(frozen=True, slots=True)
class Part:
    """An advantage function or a loss function.

    Attributes:
        name: Its name in training files.
        family: ``"advantage"`` (`algorithms.advantages`) or ``"loss"`` (`algorithms.losses`).
        function: The function, or its place as ``"module:name"``, which is imported when it is first used.
        needs: ``"critic"``: values of a critic. ``"groups"``: at least two episodes per task. ``"on_policy"``: samples
            of the current policy, hence one update per train step.
        keys: The keys of the `algorithm` section that only parts which name them here use.
        section: Pydantic class of its own parameters, which a training file gives in `algorithm.parameters`; None if it
            has none.
    """

    name: str
    family: Literal["advantage", "loss"]
    function: Callable[..., Any] | str
    needs: frozenset[Need] = frozenset()
    keys: frozenset[str] = frozenset()
    section: Any = None

    def load(self) -> Callable[..., Any]:
        """Return the function."""
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), name)
        return found


_FOLDER = __name__.rpartition(".")[0]
PARTS: tuple[Part, ...] = (
    Part("group_normalised", "advantage", f"{_FOLDER}.advantages:of_groups", needs=frozenset({"groups"})),
    Part("batch_normalised", "advantage", f"{_FOLDER}.advantages:of_batch"),
    Part(
        "gae",
        "advantage",
        f"{_FOLDER}.advantages:of_critic",
        needs=frozenset({"critic"}),
        keys=frozenset({"gae_lambda"}),
    ),
    Part("clipped", "loss", f"{_FOLDER}.losses:clipped", keys=frozenset({"clip", "dual_clip", "old_logprobs"})),
    Part("reinforce", "loss", f"{_FOLDER}.losses:reinforce", needs=frozenset({"on_policy"})),
)
_BUILT_IN: Mapping[str, Part] = {part.name: part for part in PARTS}
_OF_PARTS = frozenset(key for part in PARTS for key in part.keys)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The parameters of a learning algorithm.

    Attributes:
        advantage: The advantage function.
        loss: The loss function.
        gamma: Discount factor per turn, in [0, 1].
        gae_lambda: Lambda of the generalised advantage estimate, in [0, 1]; only for `gae`.
        clip: Half-width of the clipping range around ratio 1; only for `clipped`.
        dual_clip: Maximum of the ratio for negative advantages; only for `clipped`.
        old_logprobs: The log-probabilities that ratios are relative to: ``"sampled"``, those that the engine recorded,
            or ``"recomputed"``, those that the trainer computes with the same weights before the first update.
        entropy_coefficient: Weight of the entropy bonus.
        kl_coefficient: Weight of the KL divergence from the reference policy; at 0, no reference policy is loaded.
        advantage_clip: Maximum absolute value of an advantage; None means no maximum.
        epochs: Passes over the samples of one train step.
        minibatches: Optimiser updates per pass.
        parameters: Parameters of parts from other packages, as an instance of `Part.section`; by the part's name.
    """

    advantage: Part
    loss: Part
    gamma: float = 1.0
    gae_lambda: float = 0.95
    clip: float = 0.2
    dual_clip: float = 3.0
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    advantage_clip: float | None = None
    epochs: int = 1
    minibatches: int = 1
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[Need]:
        """What its parts need."""
        return self.advantage.needs | self.loss.needs

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm trains a critic."""
        return "critic" in self.needs


PRESETS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(_BUILT_IN["group_normalised"], _BUILT_IN["clipped"], epochs=1, minibatches=2),
    "reinforce": Algorithm(_BUILT_IN["batch_normalised"], _BUILT_IN["reinforce"], gamma=0.9),
    "ppo": Algorithm(_BUILT_IN["gae"], _BUILT_IN["clipped"], gamma=0.95, gae_lambda=0.95, epochs=1, minibatches=2),
}


def resolve(preset: str, changes: Mapping[str, Any], parts: Mapping[str, Part] = _BUILT_IN) -> Algorithm:
    """Return the preset, overridden by those `changes` that are not None.

    Args:
        preset: Name in `PRESETS`.
        changes: Values by key of the `algorithm` section; `advantage` and `loss` are names in `parts`.
        parts: The parts to choose from: those of envkit, and those of other packages.

    Raises:
        ConfigError: The preset, advantage or loss is unknown, or a value has no effect with them.
    """
    if preset not in PRESETS:
        raise ConfigError([f"algorithm.preset: no algorithm is called {preset!r}; there are: {', '.join(PRESETS)}"])
    known = {one.name for one in fields(Algorithm)} - {"parameters"}
    made = {key: value for key, value in changes.items() if value is not None and key in known}
    problems = []
    for family in ("advantage", "loss"):
        if (name := made.get(family)) is None:
            continue
        names = {part.name: part for part in parts.values() if part.family == family}
        if name in names:
            made[family] = names[name]
        else:
            problems.append(f"algorithm.{family}: no {family} is called {name!r}{did_you_mean(name, names)}")
            del made[family]
    algorithm = replace(PRESETS[preset], **made)
    used = algorithm.advantage.keys | algorithm.loss.keys
    problems += [
        f"algorithm.{key}: {algorithm.advantage.name} and {algorithm.loss.name} do not use it; remove it"
        for key in sorted((set(made) & _OF_PARTS) - used)
    ]
    if problems:
        raise ConfigError(problems)
    return _with_parameters(algorithm, changes.get("parameters") or {})


def _with_parameters(algorithm: Algorithm, given: Mapping[str, Any]) -> Algorithm:
    """Validate the parameters of the algorithm's parts; a key must belong to one of them."""
    sections = {part.name: part.section for part in (algorithm.advantage, algorithm.loss) if part.section is not None}
    keys = {key for section in sections.values() for key in section.model_fields}
    if unknown := [key for key in given if key not in keys]:
        raise ConfigError(f"algorithm.parameters.{key}: no such key{did_you_mean(key, keys)}" for key in unknown)
    made: dict[str, Any] = {}
    for name, section in sections.items():
        try:
            made[name] = section.model_validate({key: given[key] for key in section.model_fields if key in given})
        except ValidationError as error:
            raise ConfigError(_problem(one) for one in error.errors()) from None
    return replace(algorithm, parameters=made)


def _problem(error: Mapping[str, Any]) -> str:
    key = ".".join(map(str, ("algorithm.parameters", *error["loc"])))
    return f"{key}: {error['msg']}, got {error['input']!r}"


def problems(algorithm: Algorithm, *, group_size: int) -> list[str]:
    """Return why the algorithm cannot work in this combination: one line each, which starts with the key."""
    found = []
    if "groups" in algorithm.needs and group_size < 2:
        reason = f"{algorithm.advantage.name} compares the episodes of a group, so it must be at least 2"
        found.append(f"rollout.group_size: {reason}, got {group_size}")
    if "on_policy" in algorithm.needs:
        reason = f"the {algorithm.loss.name} loss is only valid for samples of the current policy"
        repeats = {"epochs": algorithm.epochs, "minibatches": algorithm.minibatches}
        found += [
            f"algorithm.{key}: {reason}; use 1, or the clipped loss, got {count}"
            for key, count in repeats.items()
            if count > 1
        ]
    return found
