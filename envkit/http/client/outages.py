"""Outages of a server: calls are repeated until the server answers again, for a limited time."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from envkit import clock
from envkit.errors import EnvkitError, UnreachableError

OUTAGE_TIMEOUT_S = 30.0
"""Default seconds for which `envkit.make` and `envkit.open_sandbox` wait for a server that restarts."""

_DELAYS_S = (0.1, 2.0)
"""Backoff: initial and maximum seconds between two attempts to reach the server."""

T = TypeVar("T")


@dataclass(eq=False)
class Outages:
    """Repeats the calls to one server while it is unreachable.

    Attributes:
        timeout_s: Maximum seconds of an outage, over all calls; 0 repeats no call.
        announce: Called with one line when an outage begins.
        is_outage: Whether an error of a call means that the call is to be repeated.
        lost: Returns the error to raise after the timeout, from the error of the last call.
        waiting_leases: Number of leases that wait for the server.
    """

    timeout_s: float
    announce: Callable[[str], None]
    is_outage: Callable[[EnvkitError], bool] = lambda error: isinstance(error, UnreachableError)
    lost: Callable[[EnvkitError], EnvkitError] = lambda error: error
    waiting_leases: int = field(default=0, init=False)
    _down_since: float | None = field(default=None, init=False)
    _rng: random.Random = field(default_factory=random.Random, init=False)

    async def call(self, call: Callable[[], Awaitable[T]], *, is_lease: bool = False) -> T:
        """Make a call that may be repeated, again and again until the server answers or the timeout is exceeded."""
        delay_s, max_s = _DELAYS_S
        while True:
            try:
                answer = await call()
            except EnvkitError as error:
                if not self.is_outage(error):
                    self._down_since = None  # the server answered
                    raise
                self._check(error)
            except anyio.get_cancelled_exc_class():
                if self._down_since is not None and not is_lease:
                    self._down_since = None  # the caller gave up; the next call starts a new count
                raise
            else:
                self._down_since = None
                return answer
            self.waiting_leases += is_lease
            try:
                await anyio.sleep(delay_s * self._rng.uniform(0.5, 1.0))  # jitter
            finally:
                self.waiting_leases -= is_lease
            delay_s = min(2 * delay_s, max_s)

    def _check(self, error: EnvkitError) -> None:
        """Record that the server did not answer, with `error`; raise an error if the outage has lasted too long."""
        now = clock.now()
        if self._down_since is None:
            self._down_since = now
            if self.timeout_s:
                self.announce(f"{error}; waiting up to {self.timeout_s:g} s for the server")
        if now - self._down_since >= self.timeout_s:
            self._down_since = None
            raise self.lost(error) from None
