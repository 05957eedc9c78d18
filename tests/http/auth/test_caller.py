"""Callers: the keys of the names that they use, and the names of keys."""

from __future__ import annotations

import pytest

from envkit.http.auth.caller import EVERYBODY, Caller
from envkit.types import TenantKey

ACME = Caller("acme", frozenset({"play"}))
OTHER = Caller("acm", frozenset({"play"}))
ADMIN = Caller("ops", frozenset({"admin"}))


def test_a_tenant_names_its_own_things_by_their_ids() -> None:
    assert (ACME.key("a"), ACME.name(TenantKey("acme", "a"))) == (("acme", "a"), "a")
    assert (EVERYBODY.key("a"), EVERYBODY.name(TenantKey("", "a"))) == (("", "a"), "a")


def test_no_name_is_the_key_of_another_tenant() -> None:
    for caller in (ACME, OTHER):
        for name in ("a", "acme:a", "acm:a", ":a", "::envs-1", ":", "", "x:acme:a"):
            assert caller.key(name) == (caller.tenant, name)
            assert not caller.key(name).is_own
    assert (ACME.visible_tenant, ADMIN.visible_tenant, EVERYBODY.visible_tenant) == ("acme", None, None)


@pytest.mark.parametrize(
    ("key", "everybody", "ops", "root"),
    [
        (TenantKey("", "a"), "a", ":a", ":a"),
        (TenantKey("", ":envs-1"), ":envs-1", "::envs-1", "::envs-1"),
        (TenantKey("ops", "a"), "ops:a", "a", "ops:a"),
        (TenantKey("acme", "a"), "acme:a", "acme:a", "acme:a"),
    ],
)
def test_an_administrator_names_everything_and_reads_back_its_names(
    key: TenantKey, everybody: str, ops: str, root: str
) -> None:
    callers = {EVERYBODY: everybody, ADMIN: ops, Caller("root", frozenset({"admin"})): root}
    for caller, name in callers.items():
        assert caller.name(key) == name
        assert caller.key(name) == key
        assert caller.key(f"{key.tenant}:{key.id}") == key or caller is EVERYBODY
