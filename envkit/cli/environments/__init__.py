"""Commands that play, show and check environments."""
