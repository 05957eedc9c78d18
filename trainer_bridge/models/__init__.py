"""Local models: the catalogue, the cache of converted models, and the metadata of saved policies."""
