"""``envkit token``, as a user types it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeAlias

import pytest

from envkit import cli, clock
from envkit.errors import UsageError
from envkit.wiring.gateway.token_store import lock_state, open_tokens, state_folder

Call: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Run ``envkit token`` in this process, with a state of the test's own."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["token", *words, "--state", str(tmp_path / "state")])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run


def test_a_token_is_printed_alone_and_works(call: Call, tmp_path: Path) -> None:
    code, out, err = call("create", "--tenant", "acme", "--name", "bob", "--scopes", "play, metrics")
    assert (code, err) == (0, "")
    caller = open_tokens(tmp_path / "state").check(out.removesuffix("\n"))
    assert caller is not None
    assert (caller.tenant, caller.scopes) == ("acme", frozenset({"play", "metrics"}))


def test_a_list_shows_states_and_times_and_no_secret(call: Call) -> None:
    began = clock.wall()
    secrets = [
        call("create", "--tenant", "acme", "--name", "bob", "--ttl", "30d")[1],
        call("create", "--tenant", "umbrella")[1],
    ]
    ids = [text.split("_")[1] for text in secrets]
    assert call("revoke", ids[1]) == (0, f"revoked {ids[1]}\n", "")
    code, out, err = call("ls")
    assert (code, err) == (0, "")
    headings, *rows = [re.split("  +", line) for line in out.splitlines()]
    assert headings == ["ID", "NAME", "TENANT", "SCOPES", "STATE", "CREATED", "EXPIRES", "LAST USED"]
    assert [row[:5] for row in rows] == [
        [ids[0], "bob", "acme", "play,sandbox", "valid"],
        [ids[1], ids[1], "umbrella", "play,sandbox", "revoked"],
    ]
    assert rows[1][6:] == ["never", "never"]
    made, ends = (datetime.strptime(text, "%Y-%m-%d %H:%M") for text in rows[0][5:7])
    assert ends - made == timedelta(days=30)
    assert not any(text.split("_", 2)[2].strip() in out for text in secrets)
    assert clock.wall() - began < 30
    listed = json.loads(call("ls", "--json")[1])
    assert [(one["id"], one["state"], one["used_s"]) for one in listed] == [
        (ids[0], "valid", None),
        (ids[1], "revoked", None),
    ]
    assert listed[0]["expires_s"] - listed[0]["created_s"] == 30 * 86400


def test_the_folder_of_state_is_the_chosen_one_or_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_folder(Path("~/mine")) == tmp_path / "mine"
    assert state_folder() == tmp_path / "xdg" / "envkit"
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert state_folder() == tmp_path / ".local" / "state" / "envkit"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == tmp_path / ".local" / "state" / "envkit"


def test_a_new_folder_of_state_gets_the_number_of_its_format(call: Call, tmp_path: Path) -> None:
    assert call("ls")[0] == 0

    assert (tmp_path / "state/format.json").read_text() == '{"format": 1}\n'


@pytest.mark.parametrize(("left", "found"), [("tokens.sqlite", "0, since there is no format.json"), ("other", "2")])
def test_state_of_another_format_is_refused_by_commands_and_servers(
    left: str, found: str, call: Call, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / left).touch()
    if found == "2":
        (state / "format.json").write_text('{"format": 2}')
    before = sorted(state.iterdir())
    message = (
        f"{state}: holds a server's state of another format (found {found}; this version of envkit reads 1); start the "
        "version of envkit that wrote it, move it away, or choose another folder (--state)"
    )

    assert call("create", "--tenant", "acme") == (2, "", f"{message}\n")
    with pytest.raises(UsageError) as refused:
        lock_state(state)
    assert str(refused.value) == message
    assert sorted(state.iterdir()) == before


def test_a_folder_with_files_of_others_becomes_a_folder_of_state(call: Call, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state/notes.txt").touch()

    assert call("create", "--tenant", "acme")[0] == 0
    assert call("ls")[0] == 0
