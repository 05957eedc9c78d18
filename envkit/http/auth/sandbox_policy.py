"""Sandbox policy: which sandboxes callers without the scope ``admin`` may request.

On a server without tokens, all callers have the scope ``admin``. No caller at all may mount files of the server.
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
    """Limits on the sandboxes of callers without the scope ``admin``. In patterns, ``*`` matches any characters.

    Attributes:
        networks: Hosts that sandboxes may reach: patterns of host names, or ``"open"`` for any network access. A
            sandbox without network access is always allowed.
        profiles: Patterns of allowed profiles. The profile ``strict`` is always allowed.
        images: Patterns of allowed images. The default image is always allowed. With bubblewrap, an image is a folder
            on the server's machine, and the sandbox can read all files in the folder.
        isolates: Whether sandboxes are isolated from the server. If not, only callers with the scope ``admin`` may
            create sandboxes.
        may_mount: Whether sandboxes may mount files of the server's machine.
    """

    networks: Sequence[str] = ("none",)
    profiles: Sequence[str] = ("strict",)
    images: Sequence[str] = ()
    isolates: bool = True
    may_mount: bool = False

    def require(self, spec: SandboxSpec, caller: Caller) -> None:
        """Raise `ForbiddenError` unless `caller` may create a sandbox with this spec."""
        if spec.views and not self.may_mount:
            raise ForbiddenError("views: a server mounts none of its files into sandboxes; upload the files instead")
        if caller.is_admin:
            return
        if not self.isolates:
            raise ForbiddenError("sandboxes are not isolated on this server; use a token with the scope admin")
        # Access to any host is allowed only by the entry "open", not by a host pattern, even if the pattern is *.
        if spec.network == OPEN and OPEN not in self.networks:
            raise _refused("network", OPEN, self.networks)
        if not isinstance(spec.network, str) and OPEN not in self.networks:
            _require("network", spec.network, self.networks)
        if spec.profile != "strict":
            _require("profile", [spec.profile], self.profiles)
        if spec.image is not None:
            # With ".." a path could match a pattern and still lead to a folder that the pattern does not allow.
            if ".." in spec.image.split("/"):
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
