"""Keys of sandboxes and sessions."""

from __future__ import annotations

from envkit.types import TenantKey


def key(id: str, tenant: str = "") -> TenantKey:
    return TenantKey(tenant, id)
