"""Authentication and authorization: tokens, callers, scopes and the sandbox policy."""
