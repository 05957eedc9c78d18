"""``envkit sandbox`` with the sandboxes of a server, and ``prune``, as a user types them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from envkit import clock
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.host import run_dirs
from envkit.sandbox.transfer import tar_stream
from tests.cli.commands import called, envkit
from tests.http.envs import serving, slots
from tests.http.pools import pool_of
from tests.http.remote_sandboxes import scripted

pytestmark = pytest.mark.slow

sandbox, called_sandbox = partial(envkit, "sandbox"), partial(called, "sandbox")


def table(*words: str) -> list[list[str]]:
    """The cells that are not empty, of the headings and of each row."""
    code, out, _ = called_sandbox(*words)
    assert code == 0
    return [re.split("  +", line) for line in out.splitlines()]


def beside_a_server(work: Callable[[str], None], *, is_real: bool = False) -> None:
    async def main() -> None:
        async with (
            LocalBackend() if is_real else scripted() as backend,
            slots() as host,
            pool_of(backend) as pool,
            serving(host, pool=pool, folder_transport=tar_stream) as address,
        ):
            await clock.to_thread(work, address)

    clock.run(main)


@pytest.mark.bwrap
def test_a_program_runs_in_a_sandbox_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one").write_text("1")

    def work(address: str) -> None:
        words = ("--url", address, "--env", "COLOUR=red", "--upload", f"{tmp_path}/notes:there")
        program = "echo $COLOUR $(cat there/one); echo odd >&2; exit 7"
        assert sandbox("run", *words, "--", "sh", "-c", program) == (7, "red 1\n", "odd\n")
        late = sandbox("run", "--url", address, "--timeout-s", "0.5", "--", "sleep", "60")
        assert late == (124, "", "stopped after 0.5 s\n")

    beside_a_server(work, is_real=True)


@pytest.mark.bwrap
def test_detached_sandboxes_are_listed_used_and_ended() -> None:
    def work(address: str) -> None:
        code, name, _ = sandbox("run", "--url", address, "-d")
        assert code == 0
        assert sandbox("exec", "--url", address, name.strip(), "--", "echo", "hi")[:2] == (0, "hi\n")
        headings, row = table("ls", "--url", address)
        assert headings == ["ID", "STATE", "AGE", "NODE", "COMMAND", "REASON"]
        assert (row[:2], row[3:]) == ([name.strip(), "leased"], ["here", "started on here"])
        assert called_sandbox("rm", "--url", address, name.strip()) == (0, "", "")
        assert sandbox("exec", "--url", address, name.strip(), "--", "echo")[0] == 125
        _, row = table("ls", "--url", address)
        assert re.fullmatch(r"ended \d+ s ago", row[1])
        (listed,) = json.loads(called_sandbox("ls", "--url", address, "--json")[1])
        assert (listed["id"], listed["state"]) == (name.strip(), "stopped")

    beside_a_server(work, is_real=True)


def test_snapshots_are_listed_and_removed() -> None:
    def work(address: str) -> None:
        name = sandbox("run", "--url", address, "-d")[1].strip()
        kept = httpx.post(f"{address}/v1/sandboxes/{name}/snapshot", trust_env=False).json()["snapshot"]
        headings, row = table("snapshot", "ls", "--url", address)
        assert headings == ["NAME", "SIZE", "TAKEN", "SANDBOX", "TENANT"]
        assert (row[:2], row[3:]) == ([kept, "0.0 MiB"], [name])
        (listed,) = json.loads(called_sandbox("snapshot", "ls", "--url", address, "--json")[1])
        assert (listed["name"], listed["sandbox"], listed["tenant"]) == (kept, name, "")
        assert called_sandbox("snapshot", "rm", "--url", address, kept, "none") == (0, "", "")
        assert table("snapshot", "ls", "--url", address) == [headings]

    beside_a_server(work)


def test_a_token_file_that_other_users_can_read_is_used_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("ek_x")
    for mode, warning in (
        (0o644, f"other users can read the token file {file}; run: chmod go-rwx {file}\n"),
        (0o600, ""),
    ):
        file.chmod(mode)
        code, _, stderr = called_sandbox("ls", "--url", "http://127.0.0.1:9", "--token-file", str(file))
        assert (code, stderr.startswith(warning), stderr.count("\n")) == (1, True, 1 + bool(warning))


def test_prune_lists_and_removes_orphans_of_an_ended_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="run-") as runtime:  # a short path, used by no other test
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        make = [sys.executable, "-c", "from envkit.sandbox.host import run_dirs; print(run_dirs.new_run_folder())"]
        gone = subprocess.run(make, capture_output=True, text=True, check=True).stdout.strip()
        ours = run_dirs.new_run_folder()
        assert {ours.parent, Path(gone).parent} == {Path(runtime)}
        assert f"folder {gone}" in called_sandbox("prune", "--dry-run")[1].splitlines()
        assert Path(gone).is_dir()
        assert f"folder {gone}" in called_sandbox("prune")[1].splitlines()
        assert (Path(gone).exists(), ours.is_dir()) == (False, True)
