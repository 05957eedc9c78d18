"""Limits of a server: the memory of large requests, and the queues of WebSockets."""
