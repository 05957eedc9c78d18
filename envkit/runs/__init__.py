"""Shared by all programs that read or write results: folders, files, recorded episodes, progress, the cache."""
