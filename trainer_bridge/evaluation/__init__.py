"""Outcomes of evaluated episodes: their statistics, advice and recordings."""
