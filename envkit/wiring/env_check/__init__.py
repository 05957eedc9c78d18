"""Checks of the contract between environments and training or serving: `check_env`."""

from envkit.wiring.env_check.checking import CheckResult, check_env

__all__ = ["CheckResult", "check_env"]
