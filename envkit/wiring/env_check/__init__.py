"""Check that an environment keeps the contract that training and serving count on: `check_env`."""

from envkit.wiring.env_check.checking import Verdict, check_env

__all__ = ["Verdict", "check_env"]
