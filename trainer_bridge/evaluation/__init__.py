"""Outcomes of evaluated episodes: their statistics, advice, recordings and plots."""
