"""A completion in progress: the tokens that it has so far, and when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from envkit.types import Completion, FinishReason, SamplingParams, floats, ints


@dataclass(slots=True, eq=False)
class Progress:
    """What a completion has so far.

    Attributes:
        params: Sampling parameters.
        so_far: What an aborted call returned: the completion begins with it.
        tokens: Tokens so far.
        logprobs: Their log-probabilities in nats.
        versions: Pairs of a policy version and the number of tokens that it sampled, in order.
        generated_s: Seconds of `params.timeout_s` that are over.
    """

    params: SamplingParams
    so_far: Completion | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    generated_s: float = 0.0

    def __post_init__(self) -> None:
        if self.so_far is not None:
            self.tokens, self.logprobs = self.so_far.token_ids.tolist(), self.so_far.logprobs.tolist()
            self.versions = [list(one) for one in self.so_far.versions]

    @property
    def end(self) -> FinishReason | None:
        """Why the completion has all its tokens; None if tokens are missing."""
        if self.tokens and self.tokens[-1] in self.params.stop:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.params.max_tokens else None

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens that a policy version has sampled."""
        self.tokens += tokens
        self.logprobs += logprobs
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][1] += len(tokens)
        elif tokens:
            self.versions.append([version, len(tokens)])

    def completion(self, finish: FinishReason) -> Completion:
        ranges = tuple((version, count) for version, count in self.versions)
        return Completion(ints(self.tokens), floats(self.logprobs), finish, ranges)
