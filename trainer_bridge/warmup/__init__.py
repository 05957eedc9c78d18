"""The tiny policy and its warm-up by demonstrations."""
