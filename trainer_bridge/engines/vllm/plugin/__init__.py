"""Modules that run in the interpreter that has vllm: the weight plug-in, and the fetching of weights."""
