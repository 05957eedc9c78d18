"""The tiny policy, and the warm-up that imitates demonstrations or dialogues."""
