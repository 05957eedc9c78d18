"""Losses of the policy's tokens."""
