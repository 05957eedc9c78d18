"""Models on this machine: the catalogue, the cache of converted models, and what a saved policy folder says."""
