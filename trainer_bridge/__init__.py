"""Reinforcement learning: plays episodes and updates the weights of the policy."""

if not __name__.startswith("envkit."):
    raise ImportError(
        "import this package as envkit.trainer_bridge, not as trainer_bridge, which would load its modules twice"
        " (if you meant your own folder trainer_bridge, add an __init__.py to it, so that Python finds it first)"
    )

from .threads import wait_passively

wait_passively()  # before any module of this package loads torch
