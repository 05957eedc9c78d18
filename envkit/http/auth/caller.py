"""The caller of a request: its tenant, its scopes, and the server's keys for its sessions and sandboxes.

The server stores a tenant's session `x` under the key ``tenant:x``. Ids have no colon, so keys of different tenants
never collide. An administrator names a session of another tenant by its key. A server without tokens has one
tenant, whose name is empty, and its keys equal the ids. If tokens are created later, an administrator names such a
session as ``:id``.
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
        tenant: Owner of what the request creates; empty without tokens.
        scopes: Names of `SCOPES`; ``admin`` includes the others.
        token_id: Id of its token; empty without tokens.
        bucket: Rate limit of the tenant; None without one.
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
            ForbiddenError: The token does not have it.
        """
        if not self.may(scope):
            has = ", ".join(sorted(self.scopes))
            raise ForbiddenError(f"this needs a token with the scope {scope}; this one has {has}")

    def take(self, n: int = 1) -> None:
        """Count `n` calls of the tenant before they are made.

        Raises:
            RateLimitError: They exceed the rate limit; none is counted.
        """
        if self.bucket is not None and (wait_s := self.bucket.take(clock.stopwatch(), n)):
            raise RateLimitError(f"rate limit exceeded; retry in {wait_s:.3g} s", wait_s)

    def charge(self, n: int) -> float:
        """Count `n` calls that were already received; return how many seconds to wait before receiving more."""
        return 0.0 if self.bucket is None else self.bucket.charge(clock.stopwatch(), n)

    def key(self, id: str) -> str:
        """Return the key of the caller's session `id`."""
        if not self.tenant:
            return id
        if ADMIN in self.scopes and ":" in id:
            return id.removeprefix(":")
        return f"{self.tenant}:{id}"

    def sees(self, key: str) -> bool:
        """Return whether the caller owns a session or is an administrator."""
        return ADMIN in self.scopes or key.startswith(self.key(""))

    def name(self, key: str) -> str:
        """Return the caller's name for a session that it sees; the inverse of `key`."""
        if self.tenant and (":" not in key or key.startswith(":")):  # created without a token, or by the server itself
            return f":{key}"
        return key.removeprefix(self.key(""))


def tenant_of(key: str) -> str:
    """Return the tenant of a session or sandbox; "" if it has none or is the server's own."""
    return key.partition(":")[0] if ":" in key else ""


EVERYBODY = Caller()
"""The caller on a server without tokens; may do everything."""

NOBODY = Caller(scopes=frozenset())
"""A caller without a token on a server with tokens; may use the public paths."""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Return the caller that `envkit.http.server.middleware.AuthMiddleware` put into an ASGI scope."""
    state = scope.get("state")
    caller: Caller = EVERYBODY if state is None else state.get("caller", EVERYBODY)
    return caller


def renamed(error: EnvkitError, names: Mapping[str, str]) -> EnvkitError:
    """Return `error` with ids replaced: `names` maps each id of the server to the caller's name for it."""
    words = "|".join(re.escape(word) for word in names if word)
    if not words:
        return error
    pattern = re.compile(rf"(?<![\w./:~-])(?:{words})(?![\w/~-]|[.:]\w)")

    def rename(value: Any) -> Any:
        if isinstance(value, Cause):
            return replace(value, detail=rename(value.detail))
        return pattern.sub(lambda found: names[found[0]], value) if isinstance(value, str) else value

    return type(error)(*(rename(getattr(error, field)) for field in error.fields))
