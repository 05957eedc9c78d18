"""The host's end of the agent protocol: the `Sandbox` that every backend with an agent hands out."""
