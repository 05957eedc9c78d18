"""SWE: find and fix a bug in a Python package."""

from .env import Swe, SweOptions, SweTasks

__all__ = ["Swe", "SweOptions", "SweTasks"]
