"""Engines: sample tokens from the policy."""
