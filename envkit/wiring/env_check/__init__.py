"""`check_env` checks that an environment obeys the contract on which training and serving rely."""

from envkit.wiring.env_check.checking import CheckResult, check_env

__all__ = ["CheckResult", "check_env"]
