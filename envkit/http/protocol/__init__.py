"""The wire protocol: messages, byte encoding, and ASGI helpers."""
