"""Sessions: episodes that clients play over HTTP or WebSocket, with counters and metrics."""
