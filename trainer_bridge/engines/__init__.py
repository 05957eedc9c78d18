"""Engines, which sample tokens from the policy."""
