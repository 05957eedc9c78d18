"""Sandboxes for commands and for Python: backends, services, running servers."""
