"""Functions with which the command line and Python scripts run sandboxes and find running servers."""
