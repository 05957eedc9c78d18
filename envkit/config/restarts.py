"""Heartbeats and restarts of sandboxes, in the files of `envkit train` and `envkit serve`."""

from __future__ import annotations

from envkit.config.grammar import Count, Seconds, Section
from envkit.restarts import RestartBudget


class LivenessSection(Section):
    """When an unresponsive sandbox is declared lost. The exit of a sandbox is detected immediately."""

    lost_s: Seconds = 4.0
    """Seconds without an answer after which a sandbox is lost. It is probed every quarter of this time. A long step of
    an environment does not count, unless it holds Python's global interpreter lock."""

    @property
    def interval_s(self) -> float:
        """Seconds between two probes."""
        return self.lost_s / 4

    @property
    def suspect_s(self) -> float:
        """Seconds without an answer after which a sandbox has the state suspect; it recovers if it answers again."""
        return 1.5 * self.interval_s


class RestartSection(Section):
    """Limit on the restarts of lost sandboxes: of each sandbox that serves environments, and of a `warm` entry's
    sandboxes together.
    """

    budget: Count = 5
    """Maximum number of restarts within one window. A further restart on a server waits until the oldest restart leaves
    the window; a training run ends instead."""
    window_s: Seconds = 600.0
    """Length of the window in seconds."""

    def limit(self) -> RestartBudget:
        """Return the limit of this section."""
        return RestartBudget(self.budget, self.window_s)
