"""Implementation of the command `envkit train`."""
