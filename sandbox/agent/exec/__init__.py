"""Runs commands and shells inside the sandbox, and manages their processes."""
