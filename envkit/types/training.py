"""Data types that engine, rollout and trainer exchange.

An episode is a sequence of turns, and is split into samples: runs of turns in which each prompt begins with all tokens
of the turns before it. The first turn of a sample stores its whole prompt, and each later turn only its new tokens.

Lengths in brackets: [L] tokens, [T] turns, [G] episodes of the same task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from envkit.types.arrays import Bools, Floats, Hashes, Ints, bools, floats, hashes, ints
from envkit.types.environments import Observation, Reset, Step, Task
from envkit.types.outcomes import Outcome, StopReason

TrainPhase: TypeAlias = Literal["imitation", "reinforcement"]
"""A phase of a training run: learning from given tokens, or from rewards."""


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

    @property
    def is_cut(self) -> bool:
        """Whether it was cut at the token limit. A single token may be the complete move of a tiny policy."""
        return self.finish is FinishReason.LENGTH and len(self.token_ids) != 1


NO_TOKENS = Completion((), (), FinishReason.STOP, ())  # type: ignore[arg-type]
"""The completion of a player that samples no tokens."""


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """New prompt tokens (N) and completion tokens (M) of one turn.

    Attributes:
        prompt: The part of the prompt after the previous completion, as text with special tokens.
        completion: The sampled tokens, as text with special tokens.
        finish: Why the completion ended.
        prompt_ids: The token ids of `prompt` [N].
        completion_ids: The token ids of `completion` [M].
        logprobs: Log-probabilities of the completion's tokens in nats [M]; a value that is not finite is None.
        versions: Policy versions that sampled the completion, in order: pairs of a version and its number of tokens.
        seconds: Time in seconds that the model needed for the completion.
        usage: Numbers of prompt and completion tokens, if an endpoint returned them without token ids; otherwise None.
    """

    prompt: str
    completion: str
    finish: FinishReason
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()
    seconds: float
    usage: tuple[int, int] | None = None

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Numbers of prompt and completion tokens."""
        return self.usage or (len(self.prompt_ids), len(self.completion_ids))

    @property
    def is_cut(self) -> bool:
        """The same as `Completion.is_cut`."""
        return self.finish is FinishReason.LENGTH and self.num_tokens[1] != 1


@dataclass(frozen=True, slots=True)
class AgentCall:
    """How a call of a foreign agent to the policy continues its other calls, and which of its tokens count.

    Attributes:
        follows: Number of the turn whose tokens its prompt begins with; None if it starts a sample.
        keeps: Number of that turn's completion tokens that are in the prompt. The rest of them is not trained on.
        trains: Number of first tokens of its own completion that may be trained on; None means all.
        cause: Why the others are not trained on.
    """

    follows: int | None = None
    keeps: int = 0
    trains: int | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """An action of a player: its text and, from a policy, the tokens of this text; see `Turn` for the fields."""

    text: str
    new_ids: Sequence[int] = ()
    completion: Completion = NO_TOKENS
    starts_sample: bool = False
    generation: GenerationRecord | None = None
    call: AgentCall | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of an episode: the player's action, and the step that played it.

    Attributes:
        new_ids: Tokens between the last completion and this one (the observation and the template's text around it), or
            the whole prompt if `starts_sample`. The constructor converts a sequence to an array.
        completion: The policy's completion; without tokens if the player does not sample tokens.
        action: The text that was sent to the environment.
        step: The environment's answer; None if the episode was cut off before it.
        generate_s: Seconds that the player took.
        step_s: Duration of the step in seconds.
        wait_s: Seconds that the turn waited at its gate before the engine got the prompt.
        starts_sample: Whether the prompt does not continue the previous tokens, so that a new sample begins here;
            always true for the first turn.
        generation: What a language model behind an endpoint read and wrote; None for other players.
        call: How it continues other turns, if a foreign agent called the policy; None if it continues the turn before.
    """

    new_ids: Ints
    completion: Completion
    action: str
    step: Step | None
    generate_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    starts_sample: bool = False
    generation: GenerationRecord | None = None
    call: AgentCall | None = None

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


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """An episode to play.

    Attributes:
        key: Key of the episode, unique in its run. Keys sort in the order of the episodes.
        task: Its task.
        member: Index in its group, from 0.
        seed: Seed of the player's random choices, such as a language model's sampling.
        temperature: Sampling temperature of a language model; 0 always takes the most likely token.
        attempt: Number of earlier attempts that were void.
        group: Key of its group, unique in the run also if two groups play the same task. Empty: that of the task.
        index: Index of its task in the rollout.
    """

    key: str
    task: Task
    member: int
    seed: int = 0
    temperature: float = 1.0
    attempt: int = 0
    group: str = ""
    index: int = 0

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
        outcome: Why it ended, and its reward and success.
        start: Result of the reset, with the first observation; None if the episode was lost before it.
        key: Key of its `RolloutRequest`.
        attempt: Number of earlier attempts that were void.
        group: `RolloutRequest.group`.
        index: `RolloutRequest.index`.
        began_s: When the episode was requested, in seconds on the event loop's clock.
        queue_s: Seconds that it waited for an environment.
        reset_s: Seconds from then to the first observation.
        grade_s: Seconds that the grader took.
    """

    task: Task
    member: int
    turns: tuple[Turn, ...]
    outcome: Outcome
    start: Reset | None = None
    key: str = ""
    attempt: int = 0
    group: str = ""
    index: int = 0
    began_s: float = 0.0
    queue_s: float = 0.0
    reset_s: float = 0.0
    grade_s: float = 0.0

    @property
    def session(self) -> str:
        """Name of the attempt; see `RolloutRequest.session`."""
        return f"{self.key}.{self.attempt}"

    @property
    def is_void(self) -> bool:
        return self.outcome.is_void

    @property
    def is_filtered(self) -> bool:
        """Whether a limit ended the episode before its first turn, such as a first prompt that exceeds the context."""
        return not self.turns and self.outcome.stop in (StopReason.CONTEXT_OVERFLOW, StopReason.PLAYER_TIMEOUT)


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task [G]. Their rewards are compared with each other."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A token sequence for training, in 18 bytes a token. The constructor converts sequences to arrays.

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
        is_graded: Whether a grade is part of the last reward, so that the episode is worth nothing more.
        named_rewards: Rewards of each turn of the whole episode by name [T], from ``info["rewards"]`` of the steps.
        ignored: True on tokens of the policy that nothing is learned from, such as those of a version that is too old
            [L]. They are part of the episode: its return, and the advantages of all other tokens, are the same.

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
    is_graded: bool = False
    named_rewards: Mapping[str, Floats] = field(default_factory=dict)
    ignored: Bools = field(default_factory=lambda: bools(()))

    def __post_init__(self) -> None:
        for name in ("token_ids", "turn_ids", "versions"):
            object.__setattr__(self, name, ints(getattr(self, name)))
        for name in ("logprobs", "rewards"):
            object.__setattr__(self, name, floats(getattr(self, name)))
        object.__setattr__(self, "mask", bools(self.mask))
        object.__setattr__(self, "ignored", bools(self.ignored if len(self.ignored) else np.zeros_like(self.mask)))
        object.__setattr__(self, "observations", hashes(self.observations))
        lengths = {
            len(one) for one in (self.token_ids, self.mask, self.logprobs, self.turn_ids, self.versions, self.ignored)
        }
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
    """Treatment of the completions in progress by `Engine.pause`."""

    KEEP = "keep"
    """Stop at the current token; `resume` continues them, with the weights of that moment."""
    ABORT = "abort"
    """Return them as they are, with `FinishReason.ABORTED`."""
    WAIT = "wait"
    """Finish them first; requests that arrive meanwhile wait for `resume`."""
