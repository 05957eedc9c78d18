"""Trainers: update the weights of the policy."""
