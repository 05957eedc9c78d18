"""The protocol on the wire: messages, byte encoding, and the part of ASGI that the server uses."""
