"""Models on this machine: the catalogue, the cache of converted models, and the metadata of saved policies."""
