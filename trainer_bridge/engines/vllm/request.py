"""A request for a completion, and how the next part of it continues the parts before."""

from __future__ import annotations

from dataclasses import dataclass

from envkit.errors import EnvkitError
from envkit.types import FinishReason, stable_hash

from ..progress import Progress
from .client import Part
from .replica import Replica


@dataclass(slots=True, eq=False, kw_only=True)
class Request(Progress):
    """A completion in progress. Its time counts from the first token of each part.

    Attributes:
        pinned: The only replica that may generate; None for any.
        replica: The replica that generates now; None while the request waits.
        is_aborted: Whether the caller wants no more tokens than those so far.
        parts: Number of requests to servers so far.
    """

    id: str
    prompt: list[int]
    session: str | None = None
    pinned: Replica | None = None
    replica: Replica | None = None
    is_aborted: bool = False
    parts: int = 0

    @property
    def finish(self) -> FinishReason | None:
        """Why the completion is over; None if tokens are missing."""
        return self.end or (FinishReason.ABORTED if self.is_aborted else None)

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
        self.add(part.tokens[:count], part.logprobs[:count], version)

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
