"""Sandboxes over HTTP."""
