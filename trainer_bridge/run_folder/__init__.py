"""The folder of a training run: record, checkpoints, episodes and plots."""
