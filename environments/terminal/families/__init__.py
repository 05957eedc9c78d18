"""Families of generated tasks: a task is a family, a seed and a difficulty."""
