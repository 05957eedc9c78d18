"""Sessions: episodes that are played over HTTP, and what a server counts of them."""
