"""Corrections: factors that make up for a sampler whose probabilities differ from the trainer's."""
