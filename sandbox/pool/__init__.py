"""A pool of sandboxes: who gets one, on which node, and what is known of each from its start to its end."""

from envkit.sandbox.pool.pool import Pool

__all__ = ["Pool"]
