"""Config in, objects out: the only package that knows environments, sandboxes and training at once."""
