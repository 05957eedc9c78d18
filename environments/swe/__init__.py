"""SWE: find and fix a bug in a Python package."""

from .env import Swe, SweOptions, SweTasks
from .players import SweNop, SweOracle

__all__ = ["Swe", "SweNop", "SweOptions", "SweOracle", "SweTasks"]
