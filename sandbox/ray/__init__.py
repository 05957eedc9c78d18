"""Sandboxes on the nodes of a Ray cluster. A Ray actor on each node starts them; clients reach them over TCP."""
