"""Sandboxes for commands and Python scripts: backends, services, running servers."""
