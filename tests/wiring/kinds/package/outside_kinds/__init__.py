"""A package that adds one part of each family to envkit."""
