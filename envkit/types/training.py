"""Data types that engine, rollout and trainer exchange.

Lengths in brackets: [L] tokens, [T] turns, [G] episodes of the same task. Within a sample, the prompt of a turn begins
with all earlier tokens, so each turn stores only its new tokens. A turn that starts a sample stores its whole prompt.
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
        temperature: The logits are divided by it; 0 always takes the most likely token.
        top_p: Sample from the smallest set of most likely tokens whose total probability reaches `top_p`, in (0, 1].
        top_k: Sample from the `top_k` most likely tokens; 0 means all tokens.
        max_tokens: Maximum length of the completion in tokens.
        stop: Token ids that end the completion. The one that was sampled is the completion's last token.
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
    """The engine was stopped. The tokens sampled until then are valid."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion of N tokens that an engine sampled.

    Attributes:
        token_ids: Sampled tokens [N].
        logprobs: Log-probabilities of the tokens in nats [N], with the temperature applied but not top-p and top-k.
        finish: Why the completion ended.
        versions: Policy versions that sampled the tokens, in order: pairs of a version and its number of tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: a completion, and the step that played its action.

    Attributes:
        new_ids: The whole prompt if `starts_sample`; otherwise only the prompt's tokens after the previous completion:
            the observation and the chat template's text around it.
        completion: The policy's completion.
        action: The text sent to the environment.
        step: The environment's answer; None if the episode was cut off before the environment answered.
        generate_s: Seconds that the engine needed for the completion.
        step_s: Seconds that the environment needed for the step.
        starts_sample: Whether this turn starts a new sample, because its prompt does not begin with the tokens of the
            previous turns. Always true for the first turn.
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
        completion_ids: Token ids of the completion.
    """

    observation: Observation
    completion_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a completion.

    Attributes:
        ids: The whole prompt if `starts_sample`; otherwise only its tokens after the previous completion.
        starts_sample: Whether a new sample starts, because the prompt does not begin with the previous turns' tokens.
    """

    ids: tuple[int, ...]
    starts_sample: bool = False


class StopReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"
    """The environment ended the episode."""
    TRUNCATED = "truncated"
    """The episode reached a limit of the environment, such as a number of moves."""
    MAX_TURNS = "max_turns"
    """The episode reached the turn limit of the training run or evaluation."""
    MAX_TOKENS = "max_tokens"
    """The next prompt would exceed the token limit of the training run or evaluation."""
    TIMEOUT = "timeout"
    """A step or the whole episode exceeded its timeout."""
    ENV_ERROR = "env_error"
    """The environment raised an exception."""
    SANDBOX_LOST = "sandbox_lost"
    """The environment's sandbox was lost."""
    NO_COMPLETION = "no_completion"
    """The model's endpoint did not answer after all retries."""

    @property
    def is_void(self) -> bool:
        """Whether the episode says nothing about the policy, for example after a lost sandbox. Training ignores it."""
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
        task: The task that was played.
        member: Index of the episode in its group, from 0.
        turns: The turns, in order [T].
        stop: Why the episode ended.
        reward: Sum of the rewards.
        metrics: The environment's own metrics, one value per episode.
        error: What failed, in one line, if `stop.is_void`; otherwise None.
        start: Result of the reset; None if the reset did not return.
        cause: Why the episode's sandbox was lost; None if no sandbox was lost, or if the cause is unknown.
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
    """The episodes of one task [G]. The trainer compares their rewards with each other."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A token sequence for training: one or more consecutive turns of an episode.

    Attributes:
        group: Key of the task. Samples with the same key belong to the same group.
        token_ids: Prompt and completion tokens of the turns [L].
        mask: 1 for tokens that the policy sampled, 0 for all other tokens [L].
        logprobs: Log-probabilities in nats under the policy that sampled the tokens; 0 where the mask is 0 [L].
        turn_ids: Number of the turn that each token belongs to, counted from the episode's start [L].
        rewards: Reward of each turn of the whole episode, even if the sample covers only some of its turns [T].
        versions: Version of the policy that sampled each token; -1 where the mask is 0 [L].
        episode: Number of the episode, unique within an update of the weights.
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
        version: Number of train steps that led to these weights.
        location: Path of the folder or safetensors file that the engine loads; empty if the engine copies the weights
            from the trainer's model in the same process.
    """

    version: int
    location: str
