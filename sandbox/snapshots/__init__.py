"""Snapshots of a sandbox's files, kept on the host and restored into new sandboxes."""
