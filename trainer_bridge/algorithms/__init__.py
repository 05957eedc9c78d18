"""Algorithms: advantages, losses, aggregations and corrections, one part a file, and the models beside the policy."""
