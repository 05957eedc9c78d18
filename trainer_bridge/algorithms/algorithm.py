"""An algorithm: the parts that a training file chooses, and how often it learns from each sample. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from envkit.config import kinds
from envkit.config.algorithm import AlgorithmSection, PartSection

from .parts import Part

_FAMILIES = {
    "advantage": "advantages",
    "loss": "losses",
    "aggregation": "aggregations",
    "correction": "corrections",
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A part with the values of its keys."""

    part: Part
    section: PartSection

    def __call__(self, *inputs: object) -> Any:
        """Return what its function returns; see `Part.function`."""
        return self.part.function(*inputs, self.section)

    @property
    def needs(self) -> frozenset[str]:
        """What it needs; see `Part.needs`."""
        return self.part.needs_of(self.section)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A learning algorithm.

    Attributes:
        section: The section of the training file.
        advantage: The advantage; None for imitation, which has no rewards.
        aggregation: The weights of the tokens.
    """

    section: AlgorithmSection
    advantage: Chosen | None
    loss: Chosen
    aggregation: Chosen
    correction: Chosen | None = None

    @classmethod
    def of(cls, section: AlgorithmSection) -> Algorithm:
        """Return the algorithm of a training file.

        Raises:
            UsageError: The package of a part cannot be imported.
        """
        parts: dict[str, Any] = {
            name: None if (part := getattr(section, name)) is None else Chosen(kinds.find(family, part.kind), part)
            for name, family in _FAMILIES.items()
        }
        return cls(section, **parts)

    @property
    def needs(self) -> frozenset[str]:
        """What its parts need; see `Part.needs`."""
        return frozenset[str]().union(*(one.needs for _, one in self._parts()))

    @property
    def critics(self) -> int:
        """Number of critics."""
        return max(
            (int(need.removeprefix("critics:")) for need in self.needs if need.startswith("critics:")), default=0
        )

    @property
    def needs_reference(self) -> bool:
        """Whether it needs a reference policy."""
        return self.section.kl.coefficient > 0 or "reference" in self.needs

    @property
    def has_entropy_gradient(self) -> bool:
        """Whether its loss has a gradient through the entropies."""
        return self.section.entropy_coefficient > 0 or "entropy" in self.needs

    def problems(self, *, group_size: int, whole_history: bool, max_lag: int = 0) -> list[str]:
        """Return why the algorithm cannot work: one line each, which starts with the key.

        Args:
            group_size: Episodes per task.
            whole_history: Whether prompts contain all turns, so that an episode is usually one sample.
            max_lag: Maximum number of train steps between sampling a token and training on it.
        """
        found, section = [], self.section
        repeats = {key: value for key in ("epochs", "minibatches") if (value := getattr(section, key)) > 1}
        for family, one in self._parts():
            needs, name = one.needs, one.section.kind
            if "groups" in needs and group_size < 2:
                reason = f"{name} compares the episodes of a group, so it must be at least 2"
                found.append(f"rollout.group_size: {reason}, got {group_size}")
            if name == "pass_at_k" and (k := getattr(one.section, "k", 0)) >= group_size:
                found.append(f"algorithm.advantage.k: {k} must be less than rollout.group_size, which is {group_size}")
            if "on_policy" in needs:
                reason = f"the {family} {name} is only valid for samples of the current policy"
                found += [f"algorithm.{key}: {reason}; use 1, got {count}" for key, count in repeats.items()]
            if "recomputed" in needs and section.old_logprobs != "recomputed":
                reason = f"the {family} {name} needs what the trainer computes before the first update"
                found.append(f"algorithm.old_logprobs: {reason}; use recomputed, got {section.old_logprobs}")
            if "sequences" in needs and not whole_history:
                reason = f"the {family} {name} needs whole episodes, but each turn is a sample of its own"
                found.append(f"renderer.history: {reason}; use all")
        return [*found, *self._problems_of_lag(max_lag), *self._problems_of_terms()]

    def _problems_of_lag(self, max_lag: int) -> list[str]:
        """Return why the algorithm cannot learn from tokens of older weights: nothing bounds what they may do."""
        if not max_lag or self.correction is not None:
            return []
        remedy = "set algorithm.correction: tis with old_logprobs: recomputed, or use 0"
        if "on_policy" in self.loss.needs:
            reason = f"the loss {self.loss.section.kind} does not bound the ratio to the weights that sampled a token"
            return [f"rollout.max_lag: {reason}; use another loss, {remedy}"]
        if self.section.old_logprobs == "recomputed":
            reason = "recomputed log-probabilities are those of the newest weights, which hides the lag from the loss"
            return [f"rollout.max_lag: {reason}; use algorithm.old_logprobs: sampled, {remedy}"]
        return []

    def _problems_of_terms(self) -> list[str]:
        kl, overlong, found = self.section.kl, self.section.overlong, []
        if self.loss.section.kind == "dppo" and self.correction is not None:
            found.append("algorithm.correction: the ratio of dppo already makes up for the sampler; leave it out")
        if self.advantage is not None and self.advantage.section.kind == "distillation" and not self.section.reference:
            found.append("algorithm.reference: distillation needs a teacher; name a model with the same tokenizer")
        if self.advantage is not None and (name := self.advantage.section.kind) in ("distillation", "several_rewards"):
            reason = f"the advantage {name} does not read the reward that this changes; leave it out"
            found += [f"algorithm.overlong: {reason}"] if overlong is not None else []
            found += [f"algorithm.kl.place: {reason}"] if kl.coefficient > 0 and kl.place == "reward" else []
        if overlong is not None and overlong.buffer_tokens > overlong.max_tokens:
            found.append("algorithm.overlong.buffer_tokens: must be at most max_tokens, or empty answers are penalised")
        if kl.estimator == "k1" and kl.place == "loss":
            reason = "k1 in the loss has a gradient of 0 on average"
            found.append(f"algorithm.kl.estimator: {reason}; use k2 or k3_unbiased, or kl.place: reward")
        if kl.estimator == "k3_unbiased" and kl.place == "reward":
            found.append(
                "algorithm.kl.estimator: k3_unbiased differs from k3 only in its gradient; use k3 in the reward"
            )
        if kl.target is not None and kl.coefficient == 0:
            found.append("algorithm.kl.target: a coefficient of 0 stays 0; use a larger kl.coefficient")
        if self.section.reference is not None and not self.needs_reference:
            found.append("algorithm.reference: no part needs a reference policy; use kl.coefficient, or leave it out")
        if self.section.value_clip is not None and not self.critics:
            found.append("algorithm.value_clip: the advantage has no critic; leave it out")
        return found

    def _parts(self) -> Iterator[tuple[str, Chosen]]:
        for family in _FAMILIES:
            if (one := getattr(self, family)) is not None:
                yield family, one


def imitation() -> Algorithm:
    """Return the algorithm of a phase of imitation: the mean over the tokens of their negative log-probabilities."""
    section = AlgorithmSection.model_validate({"preset": "reinforce", "loss": "imitation"})
    return replace(Algorithm.of(section), advantage=None)
