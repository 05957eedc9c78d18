"""Authentication and authorization: tokens, callers, scopes, rate limits and the sandbox policy."""
