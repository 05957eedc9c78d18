"""Reinforcement learning: plays episodes and updates the weights of the policy."""

if not __name__.startswith("envkit."):
    raise ImportError(
        "import this package as envkit.trainer_bridge, not as trainer_bridge: Python would load its modules twice"
        " (a folder of your own with this name needs an __init__.py, so that Python finds it first)"
    )
