"""Network access for sandboxes, through a proxy with an allowlist of hosts."""
