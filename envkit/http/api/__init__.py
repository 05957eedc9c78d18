"""The application: its operations over HTTP and WebSocket."""
