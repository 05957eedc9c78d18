"""The backend `docker`: containers of a Docker daemon."""
