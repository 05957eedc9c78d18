"""Foreign agents: programs that call a language model over HTTP play episodes, and their calls become samples."""
