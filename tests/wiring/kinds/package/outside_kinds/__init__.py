"""A package that adds an engine, a trainer, a renderer, a sandbox backend and an agent to envkit."""
