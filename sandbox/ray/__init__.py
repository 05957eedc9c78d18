"""Sandboxes on the nodes of a Ray cluster: an actor on each node starts them, and calls use a direct TCP connection."""
