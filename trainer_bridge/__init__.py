"""Reinforcement learning: plays episodes and updates the weights of the policy."""

if not __name__.startswith("envkit."):
    raise ImportError(
        "import this package as envkit.trainer_bridge: imported as a top-level package, its modules would exist twice"
        " (a folder of your own with this name needs an __init__.py)"
    )
