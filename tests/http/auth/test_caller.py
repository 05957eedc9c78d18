"""Callers: session keys, names and visibility."""

from __future__ import annotations

import pytest

from envkit.errors import EnvkitError, ForbiddenError, SandboxLostError
from envkit.http.auth.caller import EVERYBODY, Caller, caller_of, renamed
from tests.causes import cause

ACME = Caller("acme", frozenset({"play"}))
OTHER = Caller("acm", frozenset({"play"}))
ADMIN = Caller("ops", frozenset({"admin"}))


def test_key_and_name_are_inverse() -> None:
    assert (ACME.key("a"), ACME.name("acme:a")) == ("acme:a", "a")
    assert (EVERYBODY.key("a"), EVERYBODY.name("a")) == ("a", "a")


def test_no_id_gives_a_tenant_access_to_another_one() -> None:
    assert [ACME.sees(key) for key in ("acme:a", "acm:a", "a")] == [True, False, False]
    assert not OTHER.sees("acme:a")
    assert OTHER.key("acme:a") == "acm:acme:a"


def test_an_administrator_uses_keys_for_the_ids_of_other_tenants() -> None:
    assert ADMIN.sees("acme:a")
    assert (ADMIN.name("acme:a"), ADMIN.key("acme:a")) == ("acme:a", "acme:a")
    assert (ADMIN.name("ops:a"), ADMIN.key("a")) == ("a", "ops:a")


def test_an_administrator_names_ids_without_a_tenant_and_the_servers_own() -> None:
    assert [ADMIN.name(key) for key in ("a", ":envs-1", "envs-1")] == [":a", "::envs-1", ":envs-1"]
    for key in ("a", ":envs-1", "envs-1", "acme:a", "ops:a"):
        assert ADMIN.key(ADMIN.name(key)) == EVERYBODY.key(EVERYBODY.name(key)) == key
    assert ACME.key(":a") == "acme::a"


def test_admin_includes_every_scope_and_others_only_their_own() -> None:
    ADMIN.require("sandbox")
    ACME.require("play")
    with pytest.raises(ForbiddenError, match="the scope sandbox; this one has play"):
        ACME.require("sandbox")


def test_an_error_uses_the_callers_names_and_keeps_paths() -> None:
    names = {"acme:x": "x", "bwrap-1": "x"}
    lost = renamed(SandboxLostError("acme:x", cause("bwrap-1: it ended")), names)
    assert isinstance(lost, SandboxLostError)
    assert (lost.sandbox_id, str(lost.cause), str(lost)) == ("x", "x: it ended", "sandbox x lost: x: it ended")
    for text, expected in {
        "there is no sandbox 'acme:x'": "there is no sandbox 'x'",
        "bwrap-1: /acme:x/bwrap-1: no file": "x: /acme:x/bwrap-1: no file",
        "acme:x.": "x.",
        "acme:x.y acme:xy bwrap-12 other.acme:x": "acme:x.y acme:xy bwrap-12 other.acme:x",
    }.items():
        assert str(renamed(EnvkitError(text), names)) == expected
    assert str(renamed(EnvkitError("all"), {"": "x"})) == "all"


def test_without_middleware_the_caller_is_everybody() -> None:
    assert caller_of({}) is caller_of({"state": {}}) is EVERYBODY
    assert caller_of({"state": {"caller": ACME}}) is ACME
