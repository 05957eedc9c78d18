"""The application: its operations as routes and as frames of a WebSocket."""
