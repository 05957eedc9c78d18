"""Protocols of engines, renderers and trainers."""

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
    """Samples completions."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Complete `prompt_ids`.

        Args:
            prompt_ids: The whole prompt.
            params: Sampling parameters.
            session: Id of the episode. Later prompts of the episode usually begin with this prompt and its completion,
                so the engine may keep the KV cache. Before it reuses the cache, the engine must check that the prompt
                begins with the cached tokens, because a chat template may rewrite earlier turns.
        """
        ...

    def forget(self, session: str) -> None:
        """Drop the KV cache of `session`."""
        ...


class WeightSink(Protocol):
    """The part of an engine that receives new policy weights between completions."""

    async def load(self, weights: Weights) -> None: ...


class Renderer(Protocol):
    """Converts text to tokens and back, one turn at a time. Sampled tokens are kept as they are, not encoded again."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        ...

    def open(self, observation: Observation) -> tuple[int, ...]:
        """Return the prompt of an episode's first turn."""
        ...

    def extend(self, history: Sequence[Exchange], observation: Observation) -> Prompt:
        """Return the prompt of a later turn.

        Args:
            history: All turns of the episode so far, in order; at least one.
            observation: The current observation.
        """
        ...

    def action(self, token_ids: Sequence[int]) -> str:
        """Return the action to send to the environment for the completion `token_ids`."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Return tokens as readable text, including special tokens."""
        ...

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of a completion whose action is `answer`."""
        ...


class Trainer(Protocol):
    """Trains the policy's weights."""

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Store samples for the next update."""
        ...

    def update(self) -> Mapping[str, float]:
        """Train on the collected samples, drop them, and return metrics (losses, entropy in nats, gradient norm)."""
        ...

    def publish(self) -> Weights:
        """Write the current weights for the engine, unless the engine copies them from the trainer's model."""
        ...

    def save(self, folder: str) -> None:
        """Write a checkpoint, which `restore` can read, into the existing `folder`."""
        ...

    def restore(self, folder: str) -> None:
        """Restore the exact training state that `save` wrote.

        Raises:
            UsageError: The folder does not contain a checkpoint of this policy and algorithm.
        """
        ...
