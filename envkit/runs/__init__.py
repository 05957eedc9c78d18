"""What every program that reads or writes results shares: folders, files, recorded episodes, progress, the cache."""
