"""Trainers, which update the weights of the policy."""
