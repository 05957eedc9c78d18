"""What a phase of imitation learns from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from envkit.types import JSON, Sample


@dataclass(frozen=True, slots=True)
class Source:
    """The samples of a phase of imitation.

    Attributes:
        updates: Number of updates.
        batch: Returns the samples of an update, given its index from 0; always the same for the same index.
        checks_from: The phase may end early after more than this number of updates.
        facts: What the summary of the run says about the samples.
    """

    updates: int
    batch: Callable[[int], Sequence[Sample]]
    checks_from: int = 0
    facts: Mapping[str, JSON] = field(default_factory=dict)
