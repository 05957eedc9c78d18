"""The folder of a training run: its record, checkpoints, episodes, plots."""
