"""The folder of a training run: records, checkpoints, episodes and plots."""
