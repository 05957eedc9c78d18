"""The gateway of `envkit serve` and its nodes."""
