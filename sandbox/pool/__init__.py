"""A pool of sandboxes: who gets one, on which node, and what is known of each from its start to its end."""

from .pool import Pool

__all__ = ["Pool"]
