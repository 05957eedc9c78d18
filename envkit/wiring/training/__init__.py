"""Implementation of the command `envkit train`."""

import envkit.trainer_bridge  # noqa: F401 # sets how torch's threads wait, before a module of this package loads torch
