"""Engines: what produces tokens."""
