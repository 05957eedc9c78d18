"""The built-in environments."""

if not __name__.startswith("envkit."):
    raise ImportError(
        "import this package as envkit.environments, not as environments: Python would load its modules twice"
        " (a folder of your own with this name needs an __init__.py, so that Python finds it first)"
    )
