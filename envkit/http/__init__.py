"""The native protocol: worlds over HTTP and WebSocket."""
