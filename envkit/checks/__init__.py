"""`check_env` checks that an environment behaves as training and serving expect."""

from envkit.checks.checking import CheckResult, check_env

__all__ = ["CheckResult", "check_env"]
