"""An algorithm: the parts that a training file chooses, and how often it learns from each sample. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from envkit.config import kinds
from envkit.config.algorithm import AlgorithmSection, PartSection

from .parts import Part

_NAMES = ("advantage", "loss", "aggregation", "correction")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A part with the values of its keys."""

    part: Part
    section: PartSection

    @classmethod
    def of(cls, family: str, section: PartSection) -> Chosen:
        """Return the part of `family` in `envkit.config.kinds` that a section of a training file chooses."""
        return cls(kinds.find(family, section.kind), section)

    def __call__(self, *inputs: object) -> Any:
        """Return what its function returns; see `Part.function`."""
        return self.part.function(*inputs, self.section)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A learning algorithm; see `envkit.config.algorithm.AlgorithmSection` for the numbers.

    Attributes:
        advantage: The advantage; None for imitation, which has no rewards.
        loss: The loss.
        aggregation: The weights of the tokens.
        correction: The correction, or None.
    """

    advantage: Chosen | None
    loss: Chosen
    aggregation: Chosen
    correction: Chosen | None = None
    advantage_clip: float | None = None
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    epochs: int = 1
    minibatches: int = 1
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"

    @classmethod
    def of(cls, section: AlgorithmSection) -> Algorithm:
        """Return the algorithm of a training file.

        Raises:
            UsageError: The package of a part cannot be imported.
        """
        parts: dict[str, Any] = {
            name: None if (part := getattr(section, name)) is None else Chosen.of(family, part)
            for name, family in zip(_NAMES, ("advantages", "losses", "aggregations", "corrections"), strict=True)
        }
        return cls(**parts, **{one.name: getattr(section, one.name) for one in fields(cls) if one.name not in parts})

    @property
    def needs(self) -> frozenset[str]:
        """What its parts need; see `Part.needs`."""
        return frozenset[str]().union(*(one.part.needs for _, one in self._parts()))

    @property
    def critics(self) -> int:
        """Number of critics."""
        return max(
            (int(need.removeprefix("critics:")) for need in self.needs if need.startswith("critics:")), default=0
        )

    @property
    def needs_reference(self) -> bool:
        """Whether it needs a reference policy."""
        return self.kl_coefficient > 0 or "reference" in self.needs

    def problems(self, *, group_size: int, whole_history: bool) -> list[str]:
        """Return why the algorithm cannot work: one line each, which starts with the key.

        Args:
            group_size: Episodes per task.
            whole_history: Whether prompts contain all turns, so that an episode is usually one sample.
        """
        found = []
        repeats = {key: value for key in ("epochs", "minibatches") if (value := getattr(self, key)) > 1}
        for family, one in self._parts():
            needs, name = one.part.needs, one.section.kind
            if "groups" in needs and group_size < 2:
                reason = f"{name} compares the episodes of a group, so it must be at least 2"
                found.append(f"rollout.group_size: {reason}, got {group_size}")
            if "on_policy" in needs:
                reason = f"the {family} {name} is only valid for samples of the current policy"
                found += [f"algorithm.{key}: {reason}; use 1, got {count}" for key, count in repeats.items()]
            if "recomputed" in needs and self.old_logprobs != "recomputed":
                reason = f"the {family} {name} compares the trainer's log-probabilities with the sampler's"
                found.append(f"algorithm.old_logprobs: {reason}; use recomputed, got {self.old_logprobs}")
            if "sequences" in needs and not whole_history:
                reason = f"the {family} {name} has a ratio per sequence, but each turn is a sample of its own"
                found.append(f"renderer.history: {reason}; use all")
        return found

    def _parts(self) -> Iterator[tuple[str, Chosen]]:
        for family in _NAMES:
            if (one := getattr(self, family)) is not None:
                yield family, one


def imitation() -> Algorithm:
    """Return the algorithm of a phase of imitation: the mean over the tokens of their negative log-probabilities."""
    loss, mean = kinds.find("losses", "imitation"), kinds.find("aggregations", "token_mean")
    return Algorithm(None, Chosen(loss, loss.section()), Chosen(mean, mean.section()))
