"""What flows between engine, rollout and trainer.

Axes: B samples, L tokens, T turns, G siblings. Tokens are append-only: the prompt of a turn begins with everything
before it, so a trajectory stores each token once. A turn that starts a new sample stores its whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from envkit.types.environments import Observation, Reset, Step, Task
from envkit.types.sandboxes import Cause


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one completion.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_p: Smallest set of tokens whose probability reaches this is kept, in (0, 1].
        top_k: Number of likeliest tokens kept; 0 keeps all.
        max_tokens: Bound on the completion, in tokens.
        stop: Token ids that end the completion (and belong to it).
        seed: The completion is a function of prompt, weights, parameters and this.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop: tuple[int, ...] = ()
    seed: int = 0


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the completion."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    ABORTED = "aborted"
    """The engine was told to stop; the tokens so far are valid."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returned.

    Attributes:
        token_ids: Sampled tokens [N].
        logprobs: Their log-probabilities (nats) [N] under the distribution that was sampled from, before top-p and
            top-k but after temperature.
        finish: Why it ended.
        versions: Policy version of the tokens, as ranges of (version, number of tokens) in order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion and the step that it caused.

    Attributes:
        new_ids: Tokens since the last completion (observation and its frame); the whole prompt where `starts_sample`.
        completion: What the policy said.
        action: What was handed to the world.
        step: What the world answered; None when the episode was cut off before it did.
        generate_s: Seconds that the completion took.
        step_s: Seconds that the step took.
        starts_sample: Whether the prompt of this turn does not continue the tokens of the turn before, so that a new
            sample begins here. The first turn always begins one.
    """

    new_ids: tuple[int, ...]
    completion: Completion
    action: str
    step: Step | None
    generate_s: float = 0.0
    step_s: float = 0.0
    starts_sample: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """An observation and the completion that answered it.

    Attributes:
        observation: What the policy saw.
        said: Tokens of its completion [N].
    """

    observation: Observation
    said: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is put before a completion.

    Attributes:
        ids: Tokens that follow the last completion; the whole prompt where `starts_sample`.
        starts_sample: Whether the prompt does not continue the tokens of the turn before.
    """

    ids: tuple[int, ...]
    starts_sample: bool = False


class StopReason(StrEnum):
    """Why an episode is over."""

    TERMINATED = "terminated"
    """The world ended it."""
    TRUNCATED = "truncated"
    """The world's own limit was reached."""
    MAX_TURNS = "max_turns"
    """The caller's limit of turns was reached."""
    MAX_TOKENS = "max_tokens"
    """The next prompt would not fit into the caller's limit of tokens."""
    TIMEOUT = "timeout"
    """A step or the whole episode took longer than the caller allowed."""
    ENV_ERROR = "env_error"
    """The world raised."""
    SANDBOX_LOST = "sandbox_lost"
    """The sandbox died under it; the episode is void."""
    NO_COMPLETION = "no_completion"
    """The model's endpoint did not answer, however often it was asked; the episode is void."""

    @property
    def is_void(self) -> bool:
        """Whether the episode says nothing about the policy, so that no loss may come from it."""
        return self in (
            StopReason.TIMEOUT,
            StopReason.ENV_ERROR,
            StopReason.SANDBOX_LOST,
            StopReason.NO_COMPLETION,
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of one episode.

    Attributes:
        task: What was played.
        member: Index in its group, from 0.
        turns: What happened [T].
        stop: Why it is over.
        reward: Sum of the rewards.
        metrics: The world's own metrics, folded over the episode.
        error: One line when infrastructure failed, otherwise None.
        start: What the environment answered to reset; None when the episode was lost before.
        cause: Why its sandbox was lost, if it was and that is known.
    """

    task: Task
    member: int
    turns: tuple[Turn, ...]
    stop: StopReason
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    start: Reset | None = None
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """All plays of one task that are compared with each other [G]."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A token sequence to learn from.

    Attributes:
        group: Key that samples of the same task share.
        token_ids: Whole sequence [L].
        mask: 1 on tokens that the policy produced, 0 on prompt and observation [L].
        logprobs: Behaviour log-probabilities (nats), 0 where the mask is 0 [L].
        turn_ids: Number of the episode's turn that a token belongs to [L].
        rewards: Reward of each turn of the whole episode [T].
        versions: Policy version of each token, -1 where the mask is 0 [L].
        episode: Number that the samples of one episode share, and no others that are learned from with them.
    """

    group: str
    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    turn_ids: tuple[int, ...]
    rewards: tuple[float, ...]
    versions: tuple[int, ...]
    episode: int


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of the policy's weights.

    Attributes:
        version: Number of train steps behind them.
        location: Path of a folder or safetensors file that the engine can read; empty if it copies them from the
            trainer's model in its own process.
    """

    version: int
    location: str
