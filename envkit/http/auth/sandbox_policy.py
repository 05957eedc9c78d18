"""Policy for the sandboxes of callers without the scope ``admin``.

On a server without tokens, all callers have this scope. No caller may mount files of the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from envkit.errors import ForbiddenError
from envkit.http.auth.caller import Caller
from envkit.types import SandboxSpec

OPEN = "open"


@dataclass(frozen=True, slots=True)
class SandboxPolicy:
    """What callers without the scope ``admin`` may request. In all patterns ``*`` matches any characters.

    Attributes:
        networks: ``"open"``, or patterns of host names; no network is always allowed.
        profiles: Allowed profiles; the strict one is always allowed.
        images: Patterns of images; the default image is always allowed. With bubblewrap, an image is a folder of the
        server's machine, and sandboxes can read everything in that folder.
        isolates: Whether sandboxes are isolated from the server; if not, only callers with the scope ``admin`` may
        create them.
    """

    networks: Sequence[str] = ("none",)
    profiles: Sequence[str] = ("strict",)
    images: Sequence[str] = ()
    isolates: bool = True

    def require(self, spec: SandboxSpec, caller: Caller) -> None:
        """Check that `caller` may create a sandbox with this spec.

        Raises:
            ForbiddenError: It may not.
        """
        if spec.views:
            raise ForbiddenError("views: a server mounts none of its files into sandboxes; upload the files instead")
        if caller.is_admin:
            return
        if not self.isolates:
            raise ForbiddenError("sandboxes are not isolated on this server; use a token with the scope admin")
        # A pattern for host names, even *, does not allow network="open".
        if spec.network == OPEN and OPEN not in self.networks:
            raise _refused("network", OPEN, self.networks)
        if not isinstance(spec.network, str) and OPEN not in self.networks:
            _require("network", spec.network, self.networks)
        if spec.profile != "strict":
            _require("profile", [spec.profile], self.profiles)
        if spec.image is not None:
            if ".." in spec.image.split("/"):  # .. would lead out of the folders that a pattern allows
                raise ForbiddenError(f"image: {spec.image[:100]!r} contains '..'; use a path without it")
            _require("image", [spec.image], self.images)
        if spec.runtime is not None:
            raise ForbiddenError("runtime: needs a token with the scope admin; omit it")


def _require(name: str, wanted: Sequence[str], allowed: Sequence[str]) -> None:
    for value in wanted:
        if not any(fnmatchcase(value, pattern) for pattern in allowed):
            raise _refused(name, value, allowed)


def _refused(name: str, value: str, allowed: Sequence[str]) -> ForbiddenError:
    limit = f"limits.{name}s of this server has {', '.join(allowed) or 'no entry'}"
    return ForbiddenError(f"{name}: {value[:100]!r} needs a token with the scope admin, since {limit}")
