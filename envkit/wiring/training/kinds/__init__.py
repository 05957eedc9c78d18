"""Opens built-in kinds of parts: the engine vllm, and the trackers."""
