"""Memory budgets, queues and timeouts of a server."""
