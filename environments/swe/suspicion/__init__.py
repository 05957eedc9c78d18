"""What makes a resolved submission suspicious: names in its source, and tests that pass with one more bug."""
