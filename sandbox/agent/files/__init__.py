"""Files, folders and tar streams."""
