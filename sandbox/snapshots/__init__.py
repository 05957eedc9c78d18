"""Snapshots of a sandbox's files, which are stored on the host and restored into new sandboxes."""
