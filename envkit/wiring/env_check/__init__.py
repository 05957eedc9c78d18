"""Check that an environment keeps the contract that training and serving count on: `check_env`."""

from envkit.wiring.env_check.checking import CheckResult, check_env

__all__ = ["CheckResult", "check_env"]
