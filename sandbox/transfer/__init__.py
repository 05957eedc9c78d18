"""Copy files and folders between the host and sandboxes as tar streams. Streams from sandboxes are not trusted."""
