"""Protocols of engines, renderers and trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from envkit.types import (
    Completion,
    EngineHealth,
    Exchange,
    Floats,
    Observation,
    PauseMode,
    Prompt,
    Reset,
    Sample,
    SamplingParams,
    TrainPhase,
    Weights,
)


class Engine(Protocol):
    """Samples completions."""

    @property
    def repeats(self) -> bool:
        """Whether the same requests, made together, get the same completions.

        If so, the turns of concurrent episodes reach the engine together, so that a run repeats to the last digit.
        """
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        """Complete `prompt_ids`.

        Args:
            prompt_ids: The whole prompt.
            params: Sampling parameters.
            session: Id of the episode that the prompt belongs to; None to cache nothing. The next prompt of an episode
                usually begins with this prompt and its completion, so the engine may keep their KV cache. Before reuse,
                it must check that the new prompt begins with the cached tokens: a chat template may rewrite old turns.
                A session is one sequence: it has at most one call at a time.
            so_far: The beginning of the completion, from a call with the same prompt that was aborted. The result
                contains it, with its log-probabilities and versions, and `params.max_tokens` counts its tokens.
                `params.timeout_s` begins anew.

        Raises:
            SessionConflictError: Another call of the session is in progress, and was neither aborted nor cancelled.
            DeadlineError: The completion took longer than `params.timeout_s`.
        """
        ...

    async def abort(self, session: str) -> None:
        """Stop generating for `session`: its `generate` returns the tokens so far, with `FinishReason.ABORTED`."""
        ...

    def forget(self, session: str) -> None:
        """Release the KV cache of `session`."""
        ...


class PolicyEngine(Engine, Protocol):
    """An engine that samples from the policy and can load new weights."""

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """Stop generating until `resume`. Returns when no token is being sampled."""
        ...

    async def resume(self) -> None:
        """Generate again after `pause`."""
        ...

    async def health(self) -> EngineHealth:
        """Return the state of the engine.

        Raises:
            EnvkitError: The engine does not answer, or failed.
        """
        ...

    async def load(self, weights: Weights) -> None:
        """Sample from `weights` from now on.

        Completions that `pause` keeps continue with the new weights. A load without `pause` waits for the completions
        that are being generated.
        """
        ...


@runtime_checkable
class FetchingEngine(PolicyEngine, Protocol):
    """An engine that can bring new weights to its machines while it generates, so that `load` takes less time."""

    async def fetch(self, weights: Weights) -> None:
        """Bring `weights` to where `load` will read them. The engine goes on sampling from those that it has."""
        ...


@runtime_checkable
class FreezableEngine(PolicyEngine, Protocol):
    """An engine that can keep its present weights for some completions, such as those of an evaluation."""

    def frozen(self) -> AbstractAsyncContextManager[Engine | None]:
        """Open an engine that has the present weights during the block, whatever is loaded meanwhile.

        None if there is no room for it. There is at most one at a time.
        """
        ...


class Gate(Protocol):
    """Decides when the turns of concurrent episodes may reach the engine. By default, every turn passes at once."""

    def arrive(self) -> None:
        """Join, once the episode has its environment."""
        return

    async def together(self) -> None:
        """Wait until the next turn of the episode may begin."""
        return

    def leave(self, *, arrived: bool) -> None:
        """Leave; `arrived` is false for an episode that never joined."""
        return


class Renderer(Protocol):
    """Builds prompts from observations, and reads actions from completions. Sampled tokens are not encoded again."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        ...

    def for_episode(self, start: Reset) -> Renderer:
        """Return the renderer of an episode, which knows the system prompt and tools of the reset `start`.

        A reset with neither returns this renderer; `play` does not call this method for it.

        Raises:
            UsageError: The renderer cannot show a system prompt, or tools.
        """
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
        """Convert the completion `token_ids` into an action, which is the text to send to the environment.

        In an episode with tools, the action for a tool call is one line of JSON: ``{"name": ..., "arguments": {...}}``.
        A completion without a complete call is returned as text, and the environment tells what is wrong with it.
        """
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Return tokens as readable text, including special tokens."""
        ...

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of a completion whose action is `answer`."""
        ...


class Trainer(Protocol):
    """Trains the policy's weights. One call at a time."""

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        """Store samples for the next update, which learns nothing from their tokens that are `Sample.ignored`."""
        ...

    async def update(self) -> Mapping[str, float]:
        """Train on the stored samples, drop them, and return metrics (losses, entropy in nats, gradient norm)."""
        ...

    async def score(self, samples: Sequence[Sample]) -> Sequence[Floats]:
        """Return the log-probabilities (nats) of each sample's policy tokens under the current weights."""
        ...

    async def publish(self) -> Weights:
        """Make the current weights available to the engine: in a file, or in the memory of this process."""
        ...

    async def save(self, folder: str) -> None:
        """Write a checkpoint, which `restore` can read, into the existing `folder`."""
        ...

    async def restore(self, folder: str) -> None:
        """Restore the exact training state that `save` wrote.

        Raises:
            UsageError: The folder does not contain a checkpoint of this policy and algorithm.
        """
        ...


@runtime_checkable
class PhasedTrainer(Trainer, Protocol):
    """A trainer that can also imitate. It begins with reinforcement."""

    async def begin(self, phase: TrainPhase, steps: int) -> None:
        """Start a phase of `steps` updates from the present weights, whose version becomes 0.

        Imitation raises the log-probabilities of the samples' policy tokens; rewards and recorded log-probabilities do
        not matter. The critics and the reference policy of reinforcement start from the present weights.
        """
        ...


class Tracker(Protocol):
    """Receives the metrics of a run. An exception ends the run."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a train step; a value may be NaN."""
        ...

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Record an evaluation of the policy after train step `step`; step 0 is the policy before training."""
        ...

    def close(self) -> None:
        """Finish recording, at the end of the run."""
        ...
