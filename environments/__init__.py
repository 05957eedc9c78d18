"""The built-in environments."""

if not __name__.startswith("envkit."):
    raise ImportError(
        "import this package as envkit.environments, not as environments, which would load its modules twice"
        " (if you meant your own folder environments, add an __init__.py to it, so that Python finds it first)"
    )
