"""Check that an environment keeps the contract that training and serving count on: `check_env`."""

from envkit.wiring.env_check.checking import check_env
from envkit.wiring.env_check.verdicts import Verdict

__all__ = ["Verdict", "check_env"]
