"""Signs that a resolved submission is a cheat: names in its source, and tests that pass with one more bug."""
