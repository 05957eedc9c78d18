"""What a sandbox may be whose caller is no administrator."""

from __future__ import annotations

import pytest

from envkit.errors import ForbiddenError
from envkit.http.auth.caller import EVERYBODY, Caller
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.types import SandboxSpec

USER = Caller("acme", frozenset({"play", "sandbox"}), "1")
ADMIN = Caller("ops", frozenset({"admin"}), "2")
WISHES = {
    "network": SandboxSpec(network="open"),
    "network: 'a.example.org'": SandboxSpec(network=("a.example.org",)),
    "profile": SandboxSpec(profile="system"),
    "image: '/'": SandboxSpec(image="/"),
    "runtime": SandboxSpec(runtime="runc"),
}


@pytest.mark.parametrize("named", WISHES)
def test_what_reaches_out_of_the_box_is_for_administrators(named: str) -> None:
    with pytest.raises(ForbiddenError, match=f"^{named}"):
        SandboxPolicy().require(WISHES[named], USER)
    SandboxPolicy().require(WISHES[named], ADMIN)
    SandboxPolicy().require(WISHES[named], EVERYBODY)


@pytest.mark.parametrize("caller", [USER, ADMIN, EVERYBODY])
def test_nobody_may_see_the_servers_own_files(caller: Caller) -> None:
    with pytest.raises(ForbiddenError, match=r"^views: a server mounts none of its files"):
        SandboxPolicy().require(SandboxSpec(views=(("/etc", "/data"),)), caller)


def test_an_ordinary_sandbox_is_for_everybody() -> None:
    SandboxPolicy().require(SandboxSpec(memory_mib=64, command=("true",)), USER)


def test_what_the_server_lists_may_be_asked_for() -> None:
    permits = SandboxPolicy(networks=("*.example.org",), profiles=("strict", "system"), images=("swe/*",))
    permits.require(SandboxSpec(network=("a.example.org",), profile="system", image="swe/one"), USER)
    for spec in (SandboxSpec(network=("a.example.org", "b.org")), SandboxSpec(network="open")):
        with pytest.raises(ForbiddenError, match="network"):
            permits.require(spec, USER)


def test_what_reaches_nothing_is_for_everybody_whatever_the_server_lists() -> None:
    SandboxPolicy(networks=("pypi.org",), profiles=("system",)).require(SandboxSpec(), USER)
    SandboxPolicy(networks=(), profiles=()).require(SandboxSpec(network=()), USER)


@pytest.mark.parametrize("image", ["/srv/images/../../etc", "/srv/images/..", "swe/../secret", "swe/a/../../secret"])
def test_no_image_climbs_out_of_what_is_listed(image: str) -> None:
    permits = SandboxPolicy(images=("/srv/images/*", "swe/*"))
    with pytest.raises(ForbiddenError, match=r"^image: '.*' has '\.\.' in it$"):
        permits.require(SandboxSpec(image=image), USER)
    permits.require(SandboxSpec(image="swe/one..two"), USER)
    permits.require(SandboxSpec(image="/srv/images/one"), USER)


@pytest.mark.parametrize("pattern", ["*", "op*", "?pen"])
def test_no_pattern_of_hosts_opens_the_network_of_the_machine(pattern: str) -> None:
    permits = SandboxPolicy(networks=(pattern,))
    with pytest.raises(ForbiddenError, match="'open' needs a token"):
        permits.require(SandboxSpec(network="open"), USER)
    permits.require(SandboxSpec(network=("open",)), USER)


def test_an_open_network_holds_every_host() -> None:
    permits = SandboxPolicy(networks=("none", "open"))
    for network in ("none", "open", ("b.org",)):
        permits.require(SandboxSpec(network=network), USER)


def test_without_isolation_only_administrators_have_sandboxes() -> None:
    with pytest.raises(ForbiddenError, match="not isolated"):
        SandboxPolicy(isolates=False).require(SandboxSpec(), USER)
    SandboxPolicy(isolates=False).require(SandboxSpec(), ADMIN)
