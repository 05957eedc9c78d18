"""Suspects: which episode caused the loss of a worker, and what follows for its calls, its tenant and its environment.

Each call in progress when a worker was lost is a suspect: it may have caused the loss. The episode repeats it alone, in
a worker with one slot. If that worker is lost too, both losses are attributed to the episode, which is then void.

Attributed losses count neither against other episodes nor against the restart budget, but against the pair of tenant
and environment. After `FREE_LOSSES` of a pair within a time window, each of its new episodes is isolated: it plays
alone from the beginning. After as many more as a restart budget allows, new episodes are rejected until the oldest loss
leaves the window.

No episode causes the loss of a node or the stop of a worker, as by a drain: they make no suspects, are attributed to no
episode, and do not count against its rebuilds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from envkit import clock
from envkit.errors import EnvRejectedError
from envkit.fleet.env_worker import EnvWorker
from envkit.restarts import RestartBudget
from envkit.types import Cause, CauseKind

FREE_LOSSES = 3
"""Number of attributed losses after which each new episode is isolated."""

_UNRESPONSIVE = 1
"""An episode with more losses of unresponsive workers is not rebuilt. Losses attributed to others do not count."""


def is_from_outside(worker: EnvWorker) -> bool:
    """Return whether no episode can have caused the loss of `worker`."""
    return worker.cause.kind in (CauseKind.NODE_LOST, CauseKind.STOPPED)


class Offenders:
    """Counts the losses that are attributed to episodes, by tenant and environment.

    Args:
        budget: `window_s` is how long a loss counts. `restarts` is how many losses beyond `FREE_LOSSES` are allowed
            before new episodes are rejected.
        max_isolated: Maximum number of isolated episodes; 0 to isolate none.
    """

    def __init__(self, budget: RestartBudget, *, max_isolated: int = 0) -> None:
        self.max_isolated = max_isolated
        self._budget = budget
        self._losses: defaultdict[tuple[str, str], list[tuple[float, Cause]]] = defaultdict(list)

    def record(self, tenant: str, env_id: str, cause: Cause) -> None:
        """Count a loss that is attributed to an episode of this tenant and environment."""
        self._losses[tenant, env_id].append((clock.now(), cause))

    def is_isolated(self, tenant: str, env_id: str) -> bool:
        """Return whether new episodes of this tenant and environment are isolated.

        Raises:
            EnvRejectedError: There were too many losses, so that new episodes are rejected.
        """
        now, window_s = clock.now(), self._budget.window_s
        recent = [(at, cause) for at, cause in self._losses.pop((tenant, env_id), ()) if now - at < window_s]
        if recent:
            self._losses[tenant, env_id] = recent
        if len(recent) >= FREE_LOSSES + self._budget.restarts:
            wait_s = recent[0][0] + window_s - now
            raise EnvRejectedError(env_id, len(recent), window_s, str(recent[-1][1]), wait_s)
        return self.max_isolated > 0 and len(recent) >= FREE_LOSSES


class Suspicion:
    """Decides for one episode which losses of workers it caused, and whether it may be rebuilt.

    Args:
        rebuilds: Maximum number of rebuilds; 0 if the environment cannot be rebuilt.
        is_isolated: Whether the whole episode plays alone.
        on_attributed: Called with the cause when losses are attributed to the episode; None to call nothing.

    Attributes:
        suspect: The worker that was lost during the previous attempt of the current call; None without such a loss.
        verdict: Why the episode is void: losses were attributed to it. None before that.
    """

    def __init__(
        self, rebuilds: int, *, is_isolated: bool = False, on_attributed: Callable[[Cause], None] | None = None
    ) -> None:
        self.rebuilds = rebuilds
        self.is_isolated = is_isolated
        self.suspect: EnvWorker | None = None
        self.verdict: Cause | None = None
        self._on_attributed = on_attributed
        self._losses: list[EnvWorker] = []

    @property
    def plays_alone(self) -> bool:
        """Whether the next call must be played alone."""
        return self.is_isolated or self.suspect is not None

    def lost_during(self, call: str, worker: EnvWorker) -> None:
        """Record that `worker` was lost during a call of the episode; `call` is the name of the method."""
        if is_from_outside(worker):
            return
        before, self.suspect = self.suspect, worker
        if before is not None and worker.slots == 1:
            self.attribute(before, worker)
            self.verdict = worker.cause.followed_by(f"the previous worker was lost during the same {call}")
        elif not self.rebuilds and worker.calls_at_end == 1:
            self.attribute(worker)  # no other call can have caused the loss, and this one cannot be repeated

    def attribute(self, *workers: EnvWorker) -> None:
        """Attribute the losses of `workers` to the episode, unless no episode can have caused the last one."""
        if is_from_outside(workers[-1]):
            return
        for worker in workers:
            worker.attributed.set()
        if self._on_attributed is not None:
            self._on_attributed(workers[-1].cause)

    def may_rebuild(self, worker: EnvWorker) -> bool:
        """Record the loss of `worker`, and return whether the episode may be rebuilt after it."""
        if is_from_outside(worker):
            return self.verdict is None and self.rebuilds > 0
        self._losses.append(worker)
        own = [lost for lost in self._losses if not lost.attributed.is_set()]
        unresponsive = sum(lost.cause.kind is CauseKind.UNRESPONSIVE for lost in own)
        return self.verdict is None and 0 < self.rebuilds >= len(own) and unresponsive <= _UNRESPONSIVE
