"""The host's end of the agent protocol, and the `Sandbox` class of all backends that use an agent."""
