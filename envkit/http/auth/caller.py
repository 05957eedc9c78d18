"""Who asks: the tenant, what it may do, and what its sessions are called inside the server.

A tenant's session `x` is kept under the key ``tenant:x``. Ids have no colon, so keys of different tenants never meet,
and an administrator names the session of another tenant by its key. Without tokens there is one tenant, the empty one,
whose keys are the ids themselves; once there are tokens, an administrator names those by a colon and the key.
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
"""What a token can allow."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever made a request.

    Attributes:
        tenant: Who owns what the request makes; empty where there are no tokens.
        scopes: Names of `SCOPES`; ``admin`` includes the others.
        token_id: Which token it was; empty where there are none.
        bucket: Where the tenant's calls are counted; None where they are not.
    """

    tenant: str = ""
    scopes: frozenset[str] = frozenset(SCOPES)
    token_id: str = ""
    bucket: Bucket | None = field(default=None, compare=False)

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.scopes

    def may(self, scope: str) -> bool:
        """Say whether the caller may do what `scope` allows."""
        return scope in self.scopes or ADMIN in self.scopes

    def require(self, scope: str) -> None:
        """Let pass who may do what `scope` allows.

        Raises:
            ForbiddenError: The token does not have it.
        """
        if not self.may(scope):
            has = ", ".join(sorted(self.scopes))
            raise ForbiddenError(f"this needs a token with the scope {scope}; this one has {has}")

    def take(self, n: int = 1) -> None:
        """Count `n` calls of the tenant, before they are made.

        Raises:
            RateLimitError: They are more than may come now; none is counted.
        """
        if self.bucket is not None and (wait_s := self.bucket.take(clock.stopwatch(), n)):
            raise RateLimitError(f"too many calls; wait for {wait_s:.3g} s", wait_s)

    def charge(self, n: int) -> float:
        """Count `n` calls that came already; return the seconds after which more may be taken in."""
        return 0.0 if self.bucket is None else self.bucket.charge(clock.stopwatch(), n)

    def key(self, id: str) -> str:
        """Return the key of the session that the caller means by `id`."""
        if not self.tenant:
            return id
        if ADMIN in self.scopes and ":" in id:
            return id.removeprefix(":")
        return f"{self.tenant}:{id}"

    def sees(self, key: str) -> bool:
        """Say whether a session is the caller's own, or the caller an administrator."""
        return ADMIN in self.scopes or key.startswith(self.key(""))

    def name(self, key: str) -> str:
        """Return how the caller, who sees it, names a session; `key` gives the key again."""
        if self.tenant and (":" not in key or key.startswith(":")):  # nobody's, or the server's own
            return f":{key}"
        return key.removeprefix(self.key(""))


def tenant_of(key: str) -> str:
    """Return whose session or sandbox has this key; "" for nobody's, and for the server's own."""
    return key.partition(":")[0] if ":" in key else ""


EVERYBODY = Caller()
"""Who asks where there are no tokens: one tenant, who may do everything."""

NOBODY = Caller(scopes=frozenset())
"""Who asks for what needs no token, where there are tokens."""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Return who makes the request of an ASGI scope, as `envkit.http.server.middleware.Guard` found out."""
    state = scope.get("state")
    caller: Caller = EVERYBODY if state is None else state.get("caller", EVERYBODY)
    return caller


def renamed(error: EnvkitError, names: Mapping[str, str]) -> EnvkitError:
    """Return an error that says each of the words in `names` in the way that its caller does."""
    words = "|".join(re.escape(word) for word in names if word)
    if not words:
        return error
    pattern = re.compile(rf"(?<![\w./:~-])(?:{words})(?![\w/~-]|[.:]\w)")

    def say(value: Any) -> Any:
        if isinstance(value, Cause):
            return replace(value, detail=say(value.detail))
        return pattern.sub(lambda found: names[found[0]], value) if isinstance(value, str) else value

    return type(error)(*(say(getattr(error, field)) for field in error.fields))
