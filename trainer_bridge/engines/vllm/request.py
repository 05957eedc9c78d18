"""A completion in progress: what it has so far, and how the next part continues it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from envkit.errors import EnvkitError
from envkit.types import Completion, FinishReason, SamplingParams, floats, ints, stable_hash

from .client import Part
from .replica import Replica


@dataclass(slots=True, eq=False)
class Request:
    """A completion in progress.

    Attributes:
        id: Unique id.
        prompt: Tokens of the prompt.
        params: Sampling parameters.
        session: The session that it belongs to, if any.
        pinned: The only replica that may generate; None for any.
        tokens: Tokens so far.
        logprobs: Their log-probabilities in nats.
        versions: Pairs of a policy version and the number of tokens that it sampled, in order.
        replica: The replica that generates now; None while the request waits.
        is_aborted: Whether the caller wants no more tokens than those so far.
        parts: Number of requests to servers so far.
        generated_s: Seconds in which servers have generated, from the first token of each part.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    session: str | None
    pinned: Replica | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    replica: Replica | None = None
    is_aborted: bool = False
    parts: int = 0
    generated_s: float = 0.0

    @classmethod
    def of(
        cls,
        id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        session: str | None = None,
        so_far: Completion | None = None,
        pinned: Replica | None = None,
    ) -> Request:
        """Return the request for a call of `VllmEngine.generate`."""
        request = cls(id, list(prompt_ids), params, session, pinned)
        if so_far is not None:
            request.tokens, request.logprobs = so_far.token_ids.tolist(), so_far.logprobs.tolist()
            request.versions = [list(one) for one in so_far.versions]
        return request

    @property
    def finish(self) -> FinishReason | None:
        """Why the completion is over; None if tokens are missing."""
        if self.tokens and self.tokens[-1] in self.params.stop:
            return FinishReason.STOP
        if len(self.tokens) >= self.params.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.ABORTED if self.is_aborted else None

    @property
    def is_frozen(self) -> bool:
        """Whether its replica is kept from new weights, so that pauses do not concern it."""
        return self.pinned is not None and self.pinned.frozen is not None

    @property
    def part_id(self) -> str:
        """Id of the request for the current part, unique on its server."""
        return f"{self.id}-{self.parts}"

    @property
    def seed(self) -> int:
        """Seed of the next part. Parts must not draw the same random numbers."""
        return stable_hash(self.params.seed, len(self.tokens)) if self.tokens else self.params.seed

    def take(self, part: Part, version: int) -> None:
        """Append the tokens of a part."""
        self.generated_s += part.generated_s
        count = min(len(part.tokens), len(part.logprobs))
        self.tokens += part.tokens[:count]
        self.logprobs += part.logprobs[:count]
        if not count:
            return
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][1] += count
        else:
            self.versions.append([version, count])

    def check(self, part: Part, label: str, url: str) -> None:
        """Check a part after `take`.

        Raises:
            EnvkitError: The server at `url` sampled with other weights than those with `label`, or ended too early.
        """
        if strangers := set(part.versions) - {label}:
            raise EnvkitError(
                f"the vLLM server {url} sampled with the weights {min(strangers)!r} instead of {label!r}: "
                "another program loads weights on it; give each run its own servers"
            )
        if part.finish in ("stop", "length") and self.finish is None:
            raise EnvkitError(
                f"the vLLM server {url} ended a completion after {len(self.tokens)} of {self.params.max_tokens} "
                "tokens; check its limit of tokens"
            )

    def completion(self, finish: FinishReason) -> Completion:
        ranges = tuple((version, count) for version, count in self.versions)
        return Completion(ints(self.tokens), floats(self.logprobs), finish, ranges)
