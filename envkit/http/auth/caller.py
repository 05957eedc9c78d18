"""The caller of a request: its tenant, its scopes, and the server's keys for its sessions and sandboxes.

The server stores the session `x` of a tenant under the key ``tenant:x``. Ids contain no colon, so keys of different
tenants never collide. An administrator uses the key as the id of another tenant's session. On a server without tokens
there are no tenants, and the key equals the id. If tokens are created later, an administrator refers to such a session
as ``:x``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from envkit import clock
from envkit.errors import EnvkitError, ForbiddenError, RateLimitError
from envkit.http.auth.rate_limit import Bucket
from envkit.types import Cause

PLAY, SANDBOX, METRICS, ADMIN = "play", "sandbox", "metrics", "admin"

SCOPES: Mapping[str, str] = MappingProxyType(
    {
        PLAY: "make and play sessions",
        SANDBOX: "make and use sandboxes",
        METRICS: "read the metrics",
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
        bucket: Rate limiter of the tenant; None for no limit.
    """

    tenant: str = ""
    scopes: frozenset[str] = frozenset(SCOPES)
    token_id: str = ""
    bucket: Bucket | None = field(default=None, compare=False)

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.scopes

    def may(self, scope: str) -> bool:
        """Return whether the caller has `scope`, or is an administrator."""
        return scope in self.scopes or ADMIN in self.scopes

    def require(self, scope: str) -> None:
        """Check that the caller has `scope`.

        Raises:
            ForbiddenError: The caller's token does not have the scope.
        """
        if not self.may(scope):
            has = ", ".join(sorted(self.scopes))
            raise ForbiddenError(f"this needs a token with the scope {scope}; this one has {has}")

    def take(self, n: int = 1) -> None:
        """Count `n` new calls against the tenant's rate limit.

        Raises:
            RateLimitError: The calls exceed the rate limit. None of them is counted.
        """
        if self.bucket is not None and (wait_s := self.bucket.take(clock.stopwatch(), n)):
            raise RateLimitError(f"rate limit exceeded; retry in {wait_s:.3g} s", wait_s)

    def charge(self, n: int) -> float:
        """Count `n` received calls against the rate limit; return the seconds to wait before receiving more calls."""
        return 0.0 if self.bucket is None else self.bucket.charge(clock.stopwatch(), n)

    def key(self, id: str) -> str:
        """Return the server's key for the session or sandbox that the caller calls `id`."""
        if not self.tenant:
            return id
        if ADMIN in self.scopes and ":" in id:
            return id.removeprefix(":")
        return f"{self.tenant}:{id}"

    def sees(self, key: str) -> bool:
        """Return whether the caller may see the session or sandbox with this key: its owner or an administrator may."""
        return ADMIN in self.scopes or key.startswith(self.key(""))

    def name(self, key: str) -> str:
        """Return the id that the caller uses for the session or sandbox with this key; the inverse of `Caller.key`."""
        # Such a key was created without tokens, or belongs to a sandbox of the server itself.
        if self.tenant and (":" not in key or key.startswith(":")):
            return f":{key}"
        return key.removeprefix(self.key(""))


def tenant_of(key: str) -> str:
    """Return the tenant that owns a session or sandbox; "" if the server itself owns it or there are no tenants."""
    return key.partition(":")[0] if ":" in key else ""


EVERYBODY = Caller()
"""The caller on a server without tokens; may do everything."""

NOBODY = Caller(scopes=frozenset())
"""A caller without a token on a server with tokens; may use the public paths."""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Return the caller of a request, which `AuthMiddleware` has stored in the ASGI scope."""
    state = scope.get("state")
    caller: Caller = EVERYBODY if state is None else state.get("caller", EVERYBODY)
    return caller


def renamed(error: EnvkitError, names: Mapping[str, str]) -> EnvkitError:
    """Return a copy of `error` in which the server's keys (keys of `names`) are replaced by the caller's ids
    (values).
    """
    words = "|".join(re.escape(word) for word in names if word)
    if not words:
        return error
    pattern = re.compile(rf"(?<![\w./:~-])(?:{words})(?![\w/~-]|[.:]\w)")

    def rename(value: Any) -> Any:
        if isinstance(value, Cause):
            return replace(value, detail=rename(value.detail))
        return pattern.sub(lambda found: names[found[0]], value) if isinstance(value, str) else value

    return type(error)(*(rename(getattr(error, field)) for field in error.fields))
