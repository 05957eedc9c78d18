"""Input and output of diagnostics: events of a training run, and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envkit.types import JSON

Row = Mapping[str, JSON]
"""The metrics of a train step, as in ``metrics.jsonl``."""
Rows = Sequence[Row]
"""Rows of consecutive train steps, oldest first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a run.

    Attributes:
        name: Its name, which `diagnostics.stop_on` uses.
        line: What was seen, and what the user can do.
    """

    name: str
    line: str


@dataclass(frozen=True, slots=True)
class PushProbe:
    """The completion of a fixed prompt after a push: always the same prompt, sampling parameters and random seed.

    Attributes:
        version: Policy version that was pushed.
        is_changed: Whether the weights differ from those of the previous probe, in the engine's number format.
        token_ids: Tokens that the engine sampled.
        engine_logprobs: The engine's log-probabilities of these tokens, in nats.
        trainer_logprobs: The trainer's log-probabilities of these tokens under the pushed weights, in nats.
        replica: Index of the replica of the engine.
    """

    version: int
    is_changed: bool
    token_ids: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    trainer_logprobs: tuple[float, ...]
    replica: int = 0

    def equals(self, other: PushProbe) -> bool:
        """Whether the engine sampled the same tokens with bit-equal log-probabilities."""
        return (self.token_ids, self.engine_logprobs) == (other.token_ids, other.engine_logprobs)


@dataclass(frozen=True, slots=True)
class TrainStep:
    """A finished train step.

    Attributes:
        step: Its number.
        values: Its metrics.
        samples: Number of samples that were passed to the trainer.
        accounting: The error of its `accounting.Ledger`; empty if the sums add up.
        void_after: Number of void attempts by the kind of their last action; see `accounting.last_actions`.
        played_after: The same for the others.
    """

    step: int
    values: Row
    samples: int
    accounting: str = ""
    void_after: Mapping[str, int] = field(default_factory=dict)
    played_after: Mapping[str, int] = field(default_factory=dict)
