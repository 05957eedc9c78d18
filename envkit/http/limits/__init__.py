"""Limits of a server: memory budgets, queues, and timeouts for slow clients."""
