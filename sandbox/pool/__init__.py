"""Sandbox pool: scheduling on nodes, leases, liveness, and the history of each sandbox."""

from .pool import Pool

__all__ = ["Pool"]
