"""SWE: find and fix a bug in a Python package."""
