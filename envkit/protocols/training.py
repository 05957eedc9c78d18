"""What the parts of envkit ask of engines and trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from envkit.types import (
    Completion,
    Exchange,
    Observation,
    Prompt,
    Sample,
    SamplingParams,
    Weights,
)


class Engine(Protocol):
    """Produces tokens."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Complete `prompt_ids`.

        Args:
            prompt_ids: The whole prompt.
            params: How to sample.
            session: Name of the episode; a later prompt of the same session mostly begins with this one and its
                completion, so an engine may keep its attention cache. It must compare, since a prompt may also begin
                differently (a chat template that rewrites history).
        """
        ...

    def forget(self, session: str) -> None:
        """Drop whatever is kept for `session`."""
        ...


class WeightSink(Protocol):
    """Takes new weights, between completions."""

    async def load(self, weights: Weights) -> None: ...


class Renderer(Protocol):
    """Text to tokens and back, one turn at a time; what was sampled is never encoded again within a sample."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        ...

    def open(self, observation: Observation) -> tuple[int, ...]:
        """Return the first prompt."""
        ...

    def extend(self, history: Sequence[Exchange], observation: Observation) -> Prompt:
        """Return the prompt of a later turn.

        Args:
            history: All turns of the episode so far, in order; at least one.
            observation: What the policy has to answer now.
        """
        ...

    def action(self, said: Sequence[int]) -> str:
        """Return the completion `said` as the text that the world is given."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Return tokens as people can read them, special tokens included."""
        ...

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        """Return the tokens with which a policy would say `answer`."""
        ...


class Trainer(Protocol):
    """Changes weights."""

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Take in samples for the next update."""
        ...

    def update(self) -> Mapping[str, float]:
        """Learn from what was accumulated, drop it, and report metrics (losses, entropy in nats, gradient norm)."""
        ...

    def publish(self) -> Weights:
        """Write the current weights where an engine can read them, unless it copies them from the trainer's model."""
        ...

    def save(self, folder: str) -> None:
        """Write all that `restore` needs into `folder`, which exists."""
        ...

    def restore(self, folder: str) -> None:
        """Continue exactly where `save` was called.

        Raises:
            UsageError: The folder does not hold a checkpoint of this policy and algorithm.
        """
        ...
