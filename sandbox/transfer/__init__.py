"""Files and folders as tar streams, and their safe extraction."""
