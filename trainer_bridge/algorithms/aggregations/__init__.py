"""Aggregations: the weight of each token's loss in an update."""
