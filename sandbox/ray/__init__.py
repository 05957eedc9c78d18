"""Sandboxes on the nodes of a Ray cluster. A Ray actor on each node starts them. Clients connect to them over TCP."""
