"""Agents of others as players of these environments."""
