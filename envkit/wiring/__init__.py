"""Builds servers, evaluations and training runs from their settings.

Only this package imports environments, sandboxes and training together.
"""
