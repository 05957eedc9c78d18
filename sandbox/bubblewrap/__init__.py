"""The sandbox backend `local`, which starts bubblewrap sandboxes on this machine."""
