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
            session: Id of the episode that the prompt belongs to; None to cache nothing. The next prompt of an episode
                usually begins with this prompt and its completion, so the engine may keep their KV cache. Before reuse,
                it must check that the new prompt begins with the cached tokens: a chat template may rewrite old turns.
        """
        ...

    def forget(self, session: str) -> None:
        """Drop the KV cache of `session`."""
        ...


class WeightSink(Protocol):
    """Receives new policy weights for an engine."""

    async def load(self, weights: Weights) -> None: ...


class Renderer(Protocol):
    """Builds prompts from observations, and reads actions from completions. Sampled tokens are not encoded again."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        ...

    def open(self, observation: Observation) -> tuple[int, ...]:
        """Return the prompt of an episode's first turn, whose observation is `observation`."""
        ...

    def extend(self, history: Sequence[Exchange], observation: Observation) -> Prompt:
        """Return the prompt of a later turn.

        Args:
            history: All turns of the episode so far, in order; at least one.
            observation: The current observation.
        """
        ...

    def action(self, token_ids: Sequence[int]) -> str:
        """Convert the completion `token_ids` into an action, which is the text to send to the environment."""
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
        """Add samples to those on which the next `update` trains."""
        ...

    def update(self) -> Mapping[str, float]:
        """Train on all samples since the last update, and return metrics such as losses and the gradient norm."""
        ...

    def publish(self) -> Weights:
        """Write the current weights to disk for the engine, unless it copies them from the trainer's model."""
        ...

    def save(self, folder: str) -> None:
        """Write a checkpoint, which `restore` can read, into the existing `folder`."""
        ...

    def restore(self, folder: str) -> None:
        """Restore the training state from the checkpoint that `save` wrote to `folder`, exactly as it was.

        Raises:
            UsageError: The folder does not contain a checkpoint of this policy and algorithm.
        """
        ...
