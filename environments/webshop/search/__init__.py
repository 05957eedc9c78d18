"""Full-text search with the arithmetic of Lucene."""
