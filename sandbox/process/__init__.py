"""The backend `process`: plain processes, without isolation."""
