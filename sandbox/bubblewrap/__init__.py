"""The backend `local`: sandboxes of bubblewrap on this machine."""
