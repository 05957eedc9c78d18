"""What the command line and Python scripts use to run sandboxes, and to find running servers."""
