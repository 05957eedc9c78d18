"""Data types that engine, rollout and trainer exchange.

An episode is a sequence of turns, and is split into samples: runs of turns in which each prompt begins with all tokens
of the turns before it. The first turn of a sample stores its whole prompt, and each later turn only its new tokens.

Lengths in brackets: [L] tokens, [T] turns, [G] episodes of the same task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from envkit.types.arrays import Bools, Floats, Hashes, Ints, bools, floats, hashes, ints
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
        timeout_s: Maximum seconds that the engine generates after the first token. Waits for the engine and for pauses
            do not count.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop: tuple[int, ...] = ()
    seed: int = 0
    timeout_s: float = math.inf


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the completion."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    ABORTED = "aborted"
    """The engine was stopped. The tokens sampled until then are valid."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A completion of N tokens that an engine sampled. The constructor converts sequences to arrays.

    Attributes:
        token_ids: Sampled tokens [N].
        logprobs: Log-probabilities of the tokens in nats [N], under the distribution that they were sampled from,
            except that top-p and top-k are not applied.
        finish: Why the completion ended.
        versions: Policy versions that sampled the tokens, in order: pairs of a version and its number of tokens.
    """

    token_ids: Ints
    logprobs: Floats
    finish: FinishReason
    versions: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", ints(self.token_ids))
        object.__setattr__(self, "logprobs", floats(self.logprobs))


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of an episode: a completion, and the step that played its action.

    Attributes:
        new_ids: Tokens between the last completion and this one (the observation and the template's text around it), or
            the whole prompt if `starts_sample`. The constructor converts a sequence to an array.
        completion: The policy's completion.
        action: The text that was sent to the environment.
        step: The environment's answer; None if the episode was cut off before it.
        generate_s: Duration of the completion in seconds.
        step_s: Duration of the step in seconds.
        wait_s: Seconds that the turn waited at its gate before the engine got the prompt.
        starts_sample: Whether the prompt does not continue the previous tokens, so that a new sample begins here;
            always true for the first turn.
    """

    new_ids: Ints
    completion: Completion
    action: str
    step: Step | None
    generate_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    starts_sample: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "new_ids", ints(self.new_ids))


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
    """The caller's turn limit was reached."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next prompt and its completion do not fit into the caller's token limit."""
    TIMEOUT = "timeout"
    """A reset, a step or the whole episode exceeded the caller's timeout; the episode is void."""
    ENV_ERROR = "env_error"
    """The environment raised, or its reward was not finite; the episode is void."""
    SANDBOX_LOST = "sandbox_lost"
    """The environment's sandbox was lost."""
    NO_COMPLETION = "no_completion"
    """The engine or the model's endpoint did not complete a prompt in time; the episode is void."""
    NO_GRADE = "no_grade"
    """The grader failed or did not answer in time; the episode is void."""
    ABORTED = "aborted"
    """The engine aborted a completion at the caller's request; the episode is void."""
    STALE = "stale"
    """The episode was dropped because its tokens come from a policy version that is too old; the episode is void."""

    @property
    def is_void(self) -> bool:
        """Whether the episode does not measure the policy, as after a lost sandbox. Training ignores such episodes."""
        return self not in (
            StopReason.TERMINATED,
            StopReason.TRUNCATED,
            StopReason.MAX_TURNS,
            StopReason.CONTEXT_OVERFLOW,
        )


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """An episode to play.

    Attributes:
        key: Key of the episode, unique in its run. Keys sort in the order of the episodes.
        task: Its task.
        member: Index in its group, from 0.
        params: Sampling parameters. The seed of each turn is derived from `params.seed` and the turn's index.
        attempt: Number of earlier attempts that were void.
        group: Key of its group, unique in the run also if two groups play the same task. Empty: that of the task.
    """

    key: str
    task: Task
    member: int
    params: SamplingParams
    attempt: int = 0
    group: str = ""

    @property
    def session(self) -> str:
        """Name of the attempt's session in the engine, unique in the run."""
        return f"{self.key}.{self.attempt}"


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The record of one episode.

    Attributes:
        task: The task that was played.
        member: Index of the episode in its group, from 0.
        turns: The turns, in order [T].
        stop: Why the episode ended.
        reward: Sum of the rewards of the turns and of the grader.
        metrics: The environment's own metrics, aggregated over the episode.
        error: If infrastructure failed, the reason in one line; otherwise None.
        start: Result of the reset, with the first observation; None if the episode was lost before it.
        cause: Why its sandbox was lost; None if it was not lost, or if the cause is unknown.
        key: Key of its `RolloutRequest`.
        attempt: Number of earlier attempts that were void.
        group: `RolloutRequest.group`.
        began_s: When the episode was requested, in seconds on the event loop's clock.
        queue_s: Seconds that it waited for an environment.
        reset_s: Seconds from then to the first observation.
        grade: Reward that the grader gave after the last turn, included in `reward`; None if there was no grader.
        grade_s: Seconds that the grader took.
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
    key: str = ""
    attempt: int = 0
    group: str = ""
    began_s: float = 0.0
    queue_s: float = 0.0
    reset_s: float = 0.0
    grade: float | None = None
    grade_s: float = 0.0

    @property
    def session(self) -> str:
        """Name of the attempt; see `RolloutRequest.session`."""
        return f"{self.key}.{self.attempt}"

    @property
    def is_filtered(self) -> bool:
        """Whether the episode ended before its first turn, because its first prompt does not fit into the context."""
        return self.stop is StopReason.CONTEXT_OVERFLOW and not self.turns


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task [G]. Their rewards are compared with each other."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A token sequence for training, in 17 bytes a token. The constructor converts sequences to arrays.

    Attributes:
        group: Key of the group. Episodes of the same group play the same task, and are compared with each other.
        token_ids: Whole sequence [L].
        mask: True on tokens of the policy, False on prompt and observation [L].
        logprobs: Log-probabilities (nats) at sampling time, 0 where the mask is False [L].
        turn_ids: Turn number of each token [L].
        rewards: Reward of each turn of the whole episode [T].
        versions: Policy version of each token, -1 where the mask is False [L].
        episode: Key of the episode, the same in all samples of the episode.
        member: Index of the episode in its group, from 0.
        env_id: Id of the environment.
        stop: Why the episode ended.
        observations: Hash of the text that each turn answers, for the whole episode [T].

    Raises:
        ValueError: The arrays differ in length, or the first token has mask True, so that no token precedes it.
    """

    group: str
    token_ids: Ints
    mask: Bools
    logprobs: Floats
    turn_ids: Ints
    rewards: Floats
    versions: Ints
    episode: str
    member: int = 0
    env_id: str = ""
    stop: StopReason = StopReason.TERMINATED
    observations: Hashes = field(default_factory=lambda: hashes(()))

    def __post_init__(self) -> None:
        for name in ("token_ids", "turn_ids", "versions"):
            object.__setattr__(self, name, ints(getattr(self, name)))
        for name in ("logprobs", "rewards"):
            object.__setattr__(self, name, floats(getattr(self, name)))
        object.__setattr__(self, "mask", bools(self.mask))
        object.__setattr__(self, "observations", hashes(self.observations))
        lengths = {len(one) for one in (self.token_ids, self.mask, self.logprobs, self.turn_ids, self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"the arrays of a sample must have one length, got {sorted(lengths)}")
        if len(self.mask) and self.mask[0]:
            raise ValueError("the first token of a sample must belong to the prompt, got mask True")

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of the policy's weights.

    Attributes:
        version: Number of train steps so far.
        location: Path of a folder or safetensors file for the engine; empty if the engine copies the weights from the
            trainer's model in the same process.
        checksum: Checksum of the weights in the engine's number format. Equal checksums mean that the engine cannot
            notice the difference between two versions.
        adapter: Whether `location` is a folder with a LoRA adapter in peft's format, to be added to the model that the
            engine started with, instead of all weights.
    """

    version: int
    location: str
    checksum: int = 0
    adapter: bool = False


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The state of an engine.

    Attributes:
        version: Policy version that it samples from.
        running: Completions that are being generated.
        waiting: Requests that wait for their first token.
        is_paused: Whether `pause` was called, and `resume` not yet.
        fed_tokens: Tokens that the model has processed so far, prompts and completions; cached tokens do not count.
    """

    version: int
    running: int
    waiting: int
    is_paused: bool
    fed_tokens: int


class PauseMode(StrEnum):
    """What `Engine.pause` does with the completions that are being generated."""

    KEEP = "keep"
    """Stop at the current token; `resume` continues them, with the weights of that moment."""
    ABORT = "abort"
    """Return them as they are, with `FinishReason.ABORTED`."""
    WAIT = "wait"
    """Finish them first; requests that arrive meanwhile wait for `resume`."""
