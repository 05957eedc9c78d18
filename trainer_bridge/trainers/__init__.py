"""Trainers: what changes weights."""
