"""Sessions: episodes played over HTTP, and their counters and metrics."""
