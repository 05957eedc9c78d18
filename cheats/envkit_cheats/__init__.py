"""Cheats of the environments of envkit: players that try to earn a reward without solving the task."""
