"""Sandbox policy for callers without the scope ``admin``."""

from __future__ import annotations

import pytest

from envkit.errors import ForbiddenError
from envkit.http.auth.caller import EVERYBODY, Caller
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.types import SandboxSpec

USER = Caller("acme", frozenset({"play", "sandbox"}), "1")
ADMIN = Caller("ops", frozenset({"admin"}), "2")
PRIVILEGED = {
    "network": SandboxSpec(network="open"),
    "network: 'a.example.org'": SandboxSpec(network=("a.example.org",)),
    "profile": SandboxSpec(profile="system"),
    "image: '/'": SandboxSpec(image="/"),
    "runtime": SandboxSpec(runtime="runc"),
}


@pytest.mark.parametrize("error", PRIVILEGED)
def test_options_that_weaken_isolation_need_admin(error: str) -> None:
    with pytest.raises(ForbiddenError, match=f"^{error}"):
        SandboxPolicy().require(PRIVILEGED[error], USER)
    SandboxPolicy().require(PRIVILEGED[error], ADMIN)
    SandboxPolicy().require(PRIVILEGED[error], EVERYBODY)


@pytest.mark.parametrize("caller", [USER, ADMIN, EVERYBODY])
def test_nobody_may_mount_the_servers_files(caller: Caller) -> None:
    with pytest.raises(ForbiddenError, match=r"^views: a server mounts none of its files"):
        SandboxPolicy().require(SandboxSpec(views=(("/etc", "/data"),)), caller)


def test_a_default_sandbox_is_allowed_for_everybody() -> None:
    SandboxPolicy().require(SandboxSpec(memory_mib=64, command=("true",)), USER)


def test_listed_values_are_allowed() -> None:
    policy = SandboxPolicy(networks=("*.example.org",), profiles=("strict", "system"), images=("swe/*",))
    policy.require(SandboxSpec(network=("a.example.org",), profile="system", image="swe/one"), USER)
    for spec in (SandboxSpec(network=("a.example.org", "b.org")), SandboxSpec(network="open")):
        with pytest.raises(ForbiddenError, match="network"):
            policy.require(spec, USER)


@pytest.mark.parametrize("image", ["/srv/images/../../etc", "/srv/images/..", "swe/../secret", "swe/a/../../secret"])
def test_an_image_path_cannot_leave_the_listed_folders(image: str) -> None:
    policy = SandboxPolicy(images=("/srv/images/*", "swe/*"))
    with pytest.raises(ForbiddenError, match=r"^image: '.*' contains '\.\.'; use a path without it$"):
        policy.require(SandboxSpec(image=image), USER)
    policy.require(SandboxSpec(image="swe/one..two"), USER)
    policy.require(SandboxSpec(image="/srv/images/one"), USER)


@pytest.mark.parametrize("pattern", ["*", "op*", "?pen"])
def test_a_host_pattern_does_not_allow_the_open_network(pattern: str) -> None:
    policy = SandboxPolicy(networks=(pattern,))
    with pytest.raises(ForbiddenError, match="'open' needs a token"):
        policy.require(SandboxSpec(network="open"), USER)
    policy.require(SandboxSpec(network=("open",)), USER)


def test_without_isolation_sandboxes_need_admin() -> None:
    with pytest.raises(ForbiddenError, match="not isolated"):
        SandboxPolicy(isolates=False).require(SandboxSpec(), USER)
    SandboxPolicy(isolates=False).require(SandboxSpec(), ADMIN)
