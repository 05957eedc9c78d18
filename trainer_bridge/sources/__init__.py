"""Sources of samples to imitate: demonstrations of an expert, and dialogues of a file. Nothing here imports torch."""
