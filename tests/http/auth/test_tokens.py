"""Tokens in their file: created, checked and revoked by several processes."""

from __future__ import annotations

import hashlib
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from envkit import clock
from envkit.errors import EnvkitError, UsageError
from envkit.http.auth.caller import Caller
from envkit.http.auth.tokens import TokenStore
from envkit.http.server.request_context import _CHECK_INTERVAL_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "envkit" / "tokens.sqlite"


@pytest.fixture
def tokens(path: Path) -> TokenStore:
    return TokenStore(path, fresh_s=0)


def test_a_token_has_a_tenant_and_scopes(tokens: TokenStore) -> None:
    text = tokens.create("acme", ["sandbox", "play"], "bob")
    prefix, id, secret = text.split("_", 2)
    assert (prefix, len(secret)) == ("ek", 43)
    assert tokens.check(text) == Caller("acme", frozenset({"play", "sandbox"}), id)


def test_only_the_owner_can_read_the_file_and_it_has_no_secret(tokens: TokenStore, path: Path) -> None:
    text = tokens.create("acme", ["play"])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    files = list(path.parent.iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    secret = text.split("_", 2)[2].encode()
    content = b"".join(file.read_bytes() for file in files)
    assert secret not in content
    assert hashlib.sha256(secret).digest() in content


@pytest.mark.parametrize("spoil", [str.upper, lambda text: text[:-1], lambda text: text + "A", lambda text: f" {text}"])
def test_a_malformed_token_is_not_valid(tokens: TokenStore, spoil: Callable[[str], str]) -> None:
    assert tokens.check(spoil(tokens.create("acme", ["play"]))) is None


def test_a_valid_id_with_a_wrong_secret_is_not_valid(tokens: TokenStore) -> None:
    one, other = (tokens.create("acme", ["play"]).split("_", 2) for _ in range(2))
    assert tokens.check(f"ek_{one[1]}_{other[2]}") is None


@pytest.mark.parametrize("text", ["", "ek__", "\x00", "\ud800", "x" * 100_000, "ek_000000000000_" + "A" * 43])
def test_junk_is_not_a_valid_token(tokens: TokenStore, text: str) -> None:
    assert tokens.check(text) is None


def test_a_token_expires(tokens: TokenStore) -> None:
    short, long = tokens.create("acme", ["play"], "short", 1e-6), tokens.create("acme", ["play"], "long", 3600)
    assert tokens.check(short) is None
    assert tokens.check(long) is not None
    assert [one.is_live(clock.wall()) for one in tokens.list()] == [False, True]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_token_is_revoked_by_its_id_or_name_and_its_name_is_free_again(tokens: TokenStore, by_name: bool) -> None:
    text = tokens.create("acme", ["play"], "bob")
    id = text.split("_")[1]
    assert tokens.revoke("bob" if by_name else id) == id
    assert tokens.check(text) is None
    with pytest.raises(UsageError, match="there is no token 'bob' to revoke"):
        tokens.revoke("bob")
    assert tokens.check(tokens.create("acme", ["play"], "bob")) is not None
    assert [(one.name, one.revoked is None) for one in tokens.list()] == [("bob", False), ("bob", True)]


@pytest.mark.parametrize(
    ("tenant", "scopes", "name", "ttl_s", "message"),
    [
        ("", ["play"], None, None, "tenant: must be 1 to 32"),
        ("a:b", ["play"], None, None, "tenant: must be 1 to 32"),
        ("a\n", ["play"], None, None, "tenant: must be 1 to 32"),
        ("a", ["play"], "b b", None, "name: must be 1 to 32"),
        ("a", ["plai"], None, None, "unknown scope 'plai'; did you mean 'play'"),
        ("a", [], None, None, "needs at least one"),
        ("a", ["play"], None, 0.0, "ttl: must be above 0"),
        ("a", ["play"], None, float("nan"), "ttl: must be above 0"),
        ("a", ["play"], None, 1e12, "at most 100 years"),
    ],
)
def test_an_invalid_argument_is_refused_with_the_reason(
    tokens: TokenStore, tenant: str, scopes: list[str], name: str | None, ttl_s: float | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        tokens.create(tenant, scopes, name, ttl_s)
    assert tokens.list() == []


def test_two_tokens_cannot_share_a_name(tokens: TokenStore) -> None:
    tokens.create("acme", ["play"], "bob")
    with pytest.raises(UsageError, match="a token named 'bob' exists already"):
        tokens.create("acme", ["play"], "bob")


def test_a_valid_token_is_cached_for_fresh_s(path: Path) -> None:
    server, command, strict = TokenStore(path, fresh_s=3600), TokenStore(path), TokenStore(path, fresh_s=0)
    text = command.create("acme", ["play"])
    assert server.check(text) is not None
    command.revoke(text.split("_")[1])
    assert server.check(text) is not None
    assert strict.check(text) is None


def test_a_server_follows_a_first_token_and_a_revocation_within_a_second(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, command, now = TokenStore(path), TokenStore(path), clock.stopwatch()
    monkeypatch.setattr(clock, "stopwatch", lambda: now)
    assert not server.is_needed()
    text = command.create("acme", ["play"])
    assert server.check(text) is not None
    command.revoke(text.split("_")[1])
    now += 1 - _CHECK_INTERVAL_S  # after which an open socket is checked too
    assert server.is_needed()
    assert server.check(text) is None


def test_the_last_use_is_recorded_unless_another_process_writes(tokens: TokenStore, path: Path) -> None:
    began = clock.wall()
    text = tokens.create("acme", ["play"])
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        stopwatch = clock.stopwatch()
        assert tokens.check(text) is not None
        assert clock.stopwatch() - stopwatch < 1
        other.execute("ROLLBACK")
    other.close()
    assert tokens.list()[0].used is None
    tokens.check(text)
    used = tokens.list()[0].used
    assert used is not None
    assert used >= began


def test_removing_the_file_revokes_its_tokens(tokens: TokenStore, path: Path) -> None:
    text = tokens.create("acme", ["play"])
    for file in path.parent.iterdir():
        file.unlink()
    assert tokens.check(text) is None
    assert tokens.check(tokens.create("acme", ["play"])) is not None


def test_tokens_are_needed_from_the_first_on_even_after_its_removal(tokens: TokenStore, path: Path) -> None:
    assert not tokens.is_needed()
    other = TokenStore(path)
    other.create("acme", ["play"], "bob")
    assert tokens.is_needed()
    other.revoke("bob")
    assert TokenStore(path).is_needed()
    for file in path.parent.iterdir():
        file.unlink()
    assert tokens.is_needed()


def test_a_damaged_file_admits_nobody(tokens: TokenStore, path: Path) -> None:
    text = tokens.create("acme", ["play"])
    path.unlink()
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(EnvkitError, match="cannot use"):
        tokens.check(text)


def test_another_kind_of_file_is_refused(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(UsageError, match="is not a token file"):
        TokenStore(path)


def test_a_folder_that_others_can_write_to_is_refused(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o777)
    with pytest.raises(UsageError, match="other users may write there"):
        TokenStore(path)


def test_a_file_that_others_can_read_is_made_private_with_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = TokenStore(path).create("acme", ["play"])
    path.chmod(0o644)
    assert TokenStore(path).check(text) is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} was accessible to other users; changed its mode to 600. It contains hashes, not tokens"
    ]


def test_processes_that_open_and_write_a_new_file_at_once_lose_nothing(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from envkit.http.auth.tokens import TokenStore\n"
        "sys.stdin.readline()\n"
        "for n in range(20):\n"
        "    TokenStore(Path(sys.argv[1])).create('acme', ['play'])\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program, str(path)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for one in running:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    assert [(one.communicate(timeout=60)[1], one.returncode) for one in running] == [("", 0)] * 2
    assert len(TokenStore(path).list()) == 40
    assert [file.name for file in path.parent.iterdir()] == ["tokens.sqlite"]
