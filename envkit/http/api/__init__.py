"""The ASGI application of the server: operations on sessions and sandboxes over HTTP and WebSocket."""
