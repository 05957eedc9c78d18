"""What `envkit serve` runs: the gateway and its nodes."""
