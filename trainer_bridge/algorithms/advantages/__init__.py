"""Advantages: how much better each token was than expected."""
