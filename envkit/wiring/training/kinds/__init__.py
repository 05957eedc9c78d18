"""Opens built-in kinds of parts: the engine vllm, trackers and filters."""
