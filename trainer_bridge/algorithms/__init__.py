"""Advantages, losses and the critic: pure functions of tensors, and the table of algorithms."""
