"""The built-in environments."""

if not __name__.startswith("envkit."):
    raise ImportError(
        "import this package as envkit.environments: two copies of a module are worse than an error"
        " (a folder of your own with this name needs an __init__.py)"
    )
