"""Network access through a proxy with an allowlist."""
