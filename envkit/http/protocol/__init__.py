"""The protocol between client and server: messages, the encoding of bytes in JSON, and ASGI helpers."""
