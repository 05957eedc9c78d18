"""Algorithms: advantages, losses, aggregations and corrections, one part a file, and the models beside the policy."""

import envkit.config  # noqa: F401  # It imports all parts, so that it comes before each of them.
