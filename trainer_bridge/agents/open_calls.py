"""The calls of one episode that clients wait for, or may ask for again.

An equal body alone is a new call, since agents sample several answers to one prompt. A request gets the call of an
earlier one with the same body only

- with the same idempotency key,
- with a higher number in ``x-stainless-retry-count``, or
- if the client of the earlier one has gone before it received the whole answer.

Errors are not stored. A call whose client has gone is aborted when another request arrives, or when the episode ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .connection import HttpError
from .messages import Reply, RunningCall

MAX_STORED = 64
"""Number of answers per episode that are kept for retries."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What of a request decides whether it is a retry.

    Attributes:
        body: Hash of the route and the body.
        key: The idempotency key, if there is one.
        number: 0 for the client's first attempt.
    """

    body: bytes
    key: str | None = None
    number: int = 0


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call. Its sampling and its answer may outlive the connection of the client.

    Attributes:
        created_s: Unix time of its start in whole seconds.
        attempt: The latest request that got this call.
        clients: Number of clients that are connected and wait for the answer, or receive it.
        is_whole: Whether the last client received the whole answer.
    """

    id: str
    created_s: int
    running: RunningCall
    attempt: Attempt
    clients: int = 0
    is_whole: bool = False
    _replies: Sequence[Reply] | None = None

    async def replies(self) -> Sequence[Reply]:
        """Wait for the answers; see `RunningCall.replies`."""
        if self._replies is None:
            self._replies = await self.running.replies()
        return self._replies

    @property
    def is_running(self) -> bool:
        return self._replies is None

    def answers(self, attempt: Attempt) -> bool:
        """Whether `attempt` is a retry of this call."""
        mine = self.attempt
        has_keys = attempt.key is not None and mine.key is not None
        if attempt.body != mine.body or (has_keys and attempt.key != mine.key):
            return False
        return has_keys or attempt.number > mine.number or not (self.is_whole or self.clients)


class OpenCalls:
    """The calls of one episode, the oldest first."""

    def __init__(self) -> None:
        self._calls: list[OpenCall] = []

    def find(self, attempt: Attempt) -> OpenCall | None:
        """Return the call that `attempt` repeats. Other calls whose clients have gone are aborted.

        Raises:
            HttpError: The idempotency key was sent with another body.
        """
        same_key = [one for one in self._calls if attempt.key is not None and one.attempt.key == attempt.key]
        if any(one.attempt.body != attempt.body for one in same_key):
            message = "this idempotency key was sent with another body; use a new key"
            raise HttpError(422, "idempotency_key_reused", message)
        found = [one for one in reversed(self._calls) if one.answers(attempt)]
        call = min(found, key=lambda one: (one.is_whole, one.clients > 0), default=None)
        self.abort_orphans(call)
        if call is None:  # an attempt that fails ends the stored answer, too
            self._calls = [one for one in self._calls if one.clients or one.attempt.body != attempt.body]
        else:
            call.attempt = attempt
        return call

    def add(self, call: OpenCall) -> None:
        """Add a call, in place of the oldest one without a client if there are too many."""
        stored = [one for one in self._calls if not one.clients]
        if len(stored) >= MAX_STORED:
            self.remove(stored[0])
        self._calls.append(call)

    def remove(self, call: OpenCall) -> None:
        """Remove a call, which may have been removed before."""
        self._calls = [one for one in self._calls if one is not call]

    def abort_orphans(self, kept: OpenCall | None = None) -> None:
        """Abort and remove the running calls whose clients have gone, except `kept`."""
        for one in self._calls:
            if one.is_running and not one.clients and one is not kept:
                self.remove(one)
                one.running.abort()

    def end(self) -> None:
        """Abort all running calls."""
        for one in self._calls:
            if one.is_running:
                one.running.abort()
