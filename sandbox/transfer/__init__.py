"""Copy files and folders between the host and sandboxes as tar streams, which are extracted safely."""
