"""The backend `local`: bubblewrap sandboxes on this machine."""
