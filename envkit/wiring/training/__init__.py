"""What `envkit train` runs."""
