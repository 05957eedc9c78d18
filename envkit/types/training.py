"""Data types that engine, rollout and trainer exchange.

Array axes: B samples, L tokens, T turns, G episodes of the same task. Within a sample, the prompt of a turn begins with
all earlier tokens, so a trajectory stores each token once. A turn that starts a new sample stores its whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from envkit.types.environments import Observation, Reset, Step, Task
from envkit.types.sandboxes import Cause


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one completion.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_p: In (0, 1]; samples from the smallest set of most likely tokens whose total probability reaches `top_p`.
        top_k: Samples from the `top_k` most likely tokens; 0 means all tokens.
        max_tokens: Maximum length of the completion in tokens.
        stop: Token ids that end the completion, and are part of it.
        seed: Random seed. The same seed, prompt, weights and parameters give the same completion.
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
    """The engine was stopped; the tokens so far are valid."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion of an engine.

    Attributes:
        token_ids: Sampled tokens [N].
        logprobs: Their log-probabilities (nats) [N] after temperature, before top-p and top-k.
        finish: Why it ended.
        versions: Policy version of the tokens, as ranges of (version, number of tokens) in order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: a completion, and the step that played its action.

    Attributes:
        new_ids: Tokens since the last completion (the observation and the template's text around it), or the whole
            prompt if `starts_sample`.
        completion: The policy's completion.
        action: The text sent to the environment.
        step: The environment's answer; None if the episode was cut off before it.
        generate_s: Duration of the completion in seconds.
        step_s: Duration of the step in seconds.
        starts_sample: Whether a new sample begins here because the prompt does not continue the previous tokens; always
            true for the first turn.
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
        observation: The observation.
        completion_ids: Tokens of the completion [N].
    """

    observation: Observation
    completion_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a completion.

    Attributes:
        ids: Tokens that follow the last completion; the whole prompt if `starts_sample`.
        starts_sample: Whether the prompt does not continue the previous tokens.
    """

    ids: tuple[int, ...]
    starts_sample: bool = False


class StopReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"
    """The environment ended the episode."""
    TRUNCATED = "truncated"
    """A limit of the environment was reached."""
    MAX_TURNS = "max_turns"
    """The caller's turn limit was reached."""
    MAX_TOKENS = "max_tokens"
    """The next prompt exceeds the caller's token limit."""
    TIMEOUT = "timeout"
    """A step or the whole episode exceeded the caller's timeout."""
    ENV_ERROR = "env_error"
    """The environment raised."""
    SANDBOX_LOST = "sandbox_lost"
    """The sandbox was lost; the episode is void."""
    NO_COMPLETION = "no_completion"
    """The model's endpoint did not answer after all retries; the episode is void."""

    @property
    def is_void(self) -> bool:
        """Whether the episode says nothing about the policy, as after a lost sandbox; training then ignores it."""
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
        task: Its task.
        member: Index in its group, from 0.
        turns: Its turns [T].
        stop: Why it ended.
        reward: Sum of the rewards.
        metrics: The environment's own metrics, aggregated over the episode.
        error: One line if infrastructure failed, otherwise None.
        start: Result of the reset; None if the episode was lost before it.
        cause: Why its sandbox was lost; None if it was not, or if unknown.
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
    """The episodes of one task [G], whose rewards are compared with each other."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A token sequence for training.

    Attributes:
        group: Key of the task, shared by its samples.
        token_ids: Whole sequence [L].
        mask: 1 on tokens of the policy, 0 on prompt and observation [L].
        logprobs: Behaviour log-probabilities (nats), 0 where the mask is 0 [L].
        turn_ids: Turn number of each token [L].
        rewards: Reward of each turn of the whole episode [T].
        versions: Policy version of each token, -1 where the mask is 0 [L].
        episode: Number of the episode, unique within an update.
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
        version: Number of train steps so far.
        location: Path of a folder or safetensors file for the engine; empty if the engine copies the weights from the
            trainer's model in the same process.
    """

    version: int
    location: str
