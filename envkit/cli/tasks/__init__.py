"""Commands that make and check tasks."""
