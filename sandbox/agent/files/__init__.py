"""Reads, writes and copies files and folders of the sandbox; folders are sent as tar streams."""
