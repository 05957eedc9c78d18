"""Commands for sandboxes, images, servers and tokens."""
