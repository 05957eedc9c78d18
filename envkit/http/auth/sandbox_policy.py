"""What callers may have their sandboxes be; an administrator may have everything, as has everybody without tokens.

Nobody may have views of the server's own files.
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
    """What a sandbox may be whose caller is no administrator.

    Attributes:
        networks: What it may reach beside nothing: ``"open"`` for everything, and the names of hosts that its list may
            hold, an asterisk for any characters.
        profiles: Its profiles, beside the strict one.
        images: Its images, beside the default one; an asterisk stands for any characters. To bubblewrap an image is a
            folder of the server's machine, and all in it can be read.
        isolates: Whether what runs inside is kept away from the server; otherwise nobody else may have one.
    """

    networks: Sequence[str] = ("none",)
    profiles: Sequence[str] = ("strict",)
    images: Sequence[str] = ()
    isolates: bool = True

    def require(self, spec: SandboxSpec, caller: Caller) -> None:
        """Let pass what `caller` may ask for.

        Raises:
            ForbiddenError: It may not.
        """
        if spec.views:
            raise ForbiddenError("views: a server shows sandboxes nothing of its machine; upload the files instead")
        if caller.is_admin:
            return
        if not self.isolates:
            raise ForbiddenError("sandboxes isolate nothing on this server, and so are for tokens with the scope admin")
        if spec.network == OPEN and OPEN not in self.networks:  # no pattern of hosts stands for this machine too
            raise _refused("network", OPEN, self.networks)
        if not isinstance(spec.network, str) and OPEN not in self.networks:
            _require("network", spec.network, self.networks)
        if spec.profile != "strict":
            _require("profile", [spec.profile], self.profiles)
        if spec.image is not None:
            if ".." in spec.image.split("/"):  # it would lead out of what a pattern allows
                raise ForbiddenError(f"image: {spec.image[:100]!r} has '..' in it")
            _require("image", [spec.image], self.images)
        if spec.runtime is not None:
            raise ForbiddenError("runtime: only a token with the scope admin may choose one; leave it out")


def _require(name: str, wanted: Sequence[str], allowed: Sequence[str]) -> None:
    for one in wanted:
        if not any(fnmatchcase(one, pattern) for pattern in allowed):
            raise _refused(name, one, allowed)


def _refused(name: str, one: str, allowed: Sequence[str]) -> ForbiddenError:
    has = f"limits.{name}s of this server has {', '.join(allowed) or 'no entry'}"
    return ForbiddenError(f"{name}: {one[:100]!r} needs a token with the scope admin, since {has}")
