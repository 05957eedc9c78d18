"""Modules that run in the interpreter that has vllm: the supervisor of a server, and the weight plug-in."""
