"""The HTTP server around the application: connections, TLS, authorization, logs."""
