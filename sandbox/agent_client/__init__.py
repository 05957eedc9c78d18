"""The host's end of the agent protocol, and the class that implements `Sandbox` for all backends with an agent."""
