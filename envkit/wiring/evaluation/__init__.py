"""What `envkit eval` and `envkit play` run."""
