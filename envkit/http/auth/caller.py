"""The caller of a request: its tenant, its scopes, and how it names sessions and sandboxes.

Ids are separate for each tenant. An administrator writes ``tenant:x`` for the session ``x`` of another tenant. Sessions
that were created while the server had no tokens have no tenant. For such a session, an administrator writes ``:x``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from envkit.errors import ForbiddenError
from envkit.types import TenantKey

PLAY, SANDBOX, METRICS, NODE, ADMIN = "play", "sandbox", "metrics", "node", "admin"

SCOPES: Mapping[str, str] = MappingProxyType(
    {
        PLAY: "make and play sessions",
        SANDBOX: "make and use sandboxes",
        METRICS: "read the metrics",
        NODE: "join the server as a node",
        ADMIN: "everything, also of other tenants",
    }
)
"""Scopes of a token, and what each allows."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Attributes:
        tenant: Name of the tenant, which owns the sessions and sandboxes that the request creates; empty on a server
            without tokens.
        scopes: What the caller may do: names from `SCOPES`; ``admin`` includes all others.
        token_id: Id of the token in the request; empty on a server without tokens.
        own_prefix: Prefix of the ids of the caller's sandboxes in the pool, which begins with a colon: the sandboxes
            belong to the server itself. Empty for other callers.
    """

    tenant: str = ""
    scopes: frozenset[str] = frozenset(SCOPES)
    token_id: str = ""
    own_prefix: str = ""

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.scopes

    def may(self, scope: str) -> bool:
        """Return whether the caller has `scope`, or is an administrator."""
        return scope in self.scopes or ADMIN in self.scopes

    def require(self, scope: str) -> None:
        """Raise `ForbiddenError` unless the caller has `scope`."""
        if not self.may(scope):
            has = ", ".join(sorted(self.scopes))
            raise ForbiddenError(f"this call needs a token with the scope {scope}; the token sent has {has}")

    @property
    def visible_tenant(self) -> str | None:
        """The tenant whose sessions and sandboxes the caller may see; None for an administrator, who may see all."""
        return None if self.is_admin else self.tenant

    def key(self, name: str) -> TenantKey:
        """Return the key of the session or sandbox that the caller names `name`."""
        if self.own_prefix:
            return TenantKey(self.tenant, self.own_prefix + name)
        if ":" in name and self.is_admin:
            tenant, _, id = name.partition(":")
            if tenant or self.tenant:
                return TenantKey(tenant, id)
        # Without tokens, every name is an id, such as ":envs-1", the id of one of the server's own sandboxes, whose
        # state it may see. `SandboxAccess.usable_key` rejects other uses of them.
        return TenantKey(self.tenant, name)

    def name(self, key: TenantKey) -> str:
        """Return the name that the caller uses for the session or sandbox with this key; the inverse of `key`."""
        if self.own_prefix:
            return key.id.removeprefix(self.own_prefix)
        return key.id if key.tenant == self.tenant else f"{key.tenant}:{key.id}"


EVERYBODY = Caller()
"""The caller of each request to a server without tokens. It may do everything."""

NOBODY = Caller(scopes=frozenset())
"""The caller of a request without a token to a server with tokens. It may only use paths that need no token."""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Return the caller of a request, which `AuthMiddleware` has stored in the ASGI scope."""
    state = scope.get("state")
    caller: Caller = EVERYBODY if state is None else state.get("caller", EVERYBODY)
    return caller
