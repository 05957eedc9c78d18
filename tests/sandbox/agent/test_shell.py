"""The agent keeps shells: they keep their state, their output is exact, and no script can block them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sandbox.agent.agent_process import Answer, Client, started


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Client]:
    with started(tmp_path) as client:
        yield client


def short(answer: Answer) -> tuple[int | None, bytes, str]:
    return answer["code"], answer.out, answer["state"]


SCRIPTS = {
    "many characters of several bytes": ("echo " + "\u4f60" * 40_000, 0, "\u4f60".encode() * 40_000 + b"\n"),
    "syntax error": ("if then", 2, b""),
    "changed prompts": ("PS1='> '; PS2=x; PS4='? '; PROMPT_COMMAND='echo no'", 0, b""),
    "trap": ("trap 'echo bye' EXIT; trap '' TERM INT HUP", 0, b""),
    "closed files 8 and 9": ("exec 8>&- 9<&-; echo a", 0, b"a\n"),
    "its input closed": ("exec 0<&-; echo a", 0, b"a\n"),
    "changed separators": ("IFS=1234567890; x='a1b'; echo $x", 0, b"a b\n"),
    "unset variables are errors": ("set -u; echo a", 0, b"a\n"),
    "nothing is overwritten": ("set -C; echo a", 0, b"a\n"),
    "other names of builtins": ("alias eval=false; eval() { false; }; read() { false; }; printf() { false; }", 0, b""),
    "a locale": ("export LC_ALL=C.UTF-8; x='\u4f60\u4f60'; echo ${#x}", 0, b"2\n"),
    "posix": ("set -o posix; echo a", 0, b"a\n"),
    "pipefail": ("set -o pipefail; false | true", 1, b""),
    "next turn of a loop that is not its own": ("echo a; continue; echo b", 0, b"a\n"),
    "its folder deleted": ("mkdir gone; cd gone; rmdir ../gone; echo a", 0, b"a\n"),
}


def test_a_shell_keeps_running_after_any_script(sandbox: Client) -> None:
    for name, (script, code, out) in SCRIPTS.items():
        assert short(sandbox.shell(script, name=name)) == (code, out, "kept"), name
        # A script may change what the next one does, but the next one always gets its own answer.
        assert short(sandbox.shell("builtin echo next", name=name)) == (0, b"next\n", "kept"), name
        assert sandbox.call("close_shell", name=name)["end"] is True


def test_xtrace_shows_only_the_script(sandbox: Client) -> None:
    sandbox.shell("set -x")
    answer = sandbox.shell("echo a")
    assert (answer.out, answer.err) == (b"a\n", b"+ builtin eval 'echo a\n'\n++ echo a\n")


def test_the_output_of_a_background_job_is_read_continuously(sandbox: Client) -> None:
    sandbox.shell("(yes | head -c 3000000; echo done > flag) &")
    answer = sandbox.shell("while [ ! -e flag ]; do sleep 0.01; done", keep_bytes=1000)
    assert (answer["code"], len(answer.out)) == (0, 1000)


@pytest.mark.alone  # a shell that is slow to come back from a cancelled script is replaced
def test_a_cancelled_script_is_ended_and_the_next_one_runs(
    sandbox: Client, marker: str, sleepers: Callable[[], int]
) -> None:
    sandbox.shell("x=1")
    running = sandbox.start("shell", name="main", command=f"sleep {marker}", timeout_s=60, keep_bytes=100)
    waiting = sandbox.start("shell", name="main", command="x=2", timeout_s=60, keep_bytes=100)
    following = sandbox.start("shell", name="main", command="echo $x", timeout_s=60, keep_bytes=100)
    while sleepers() < 1:  # a shell that has not started the program may exceed its time and be lost
        assert sandbox.call("ping")["end"] is True
    sandbox.send({"id": waiting, "cancel": True})
    sandbox.send({"id": running, "cancel": True})
    assert sandbox.answer(running)["end"] is True
    assert sandbox.answer(waiting)["end"] is True
    assert short(sandbox.answer(following)) == (0, b"1\n", "kept")
    assert sleepers() == 0


def test_a_shell_killed_between_two_scripts_is_reported(sandbox: Client) -> None:
    sandbox.shell("x=1; echo $$ > shell; (sleep 0.1; kill -9 $$) & ")
    sandbox.sh("while kill -0 $(cat shell); do sleep 0.01; done 2>/dev/null")
    answer = sandbox.shell("echo never")
    assert short(answer) == (-9, b"", "lost")
    assert b"had ended" in answer.err
    assert short(sandbox.shell("echo ${x-gone}")) == (0, b"gone\n", "kept")


def test_killing_the_parent_of_a_shell_loses_it_and_leaves_no_process(
    sandbox: Client, marker: str, sleepers: Callable[[], int]
) -> None:
    assert short(sandbox.shell(f"sleep {marker} & kill -9 $PPID; sleep {marker}")) == (-9, b"", "lost")
    assert sleepers() == 0
    assert short(sandbox.shell("echo next")) == (0, b"next\n", "kept")


def test_closing_ends_the_running_script_and_refuses_the_waiting_ones(sandbox: Client) -> None:
    running = sandbox.start("shell", name="main", command="sleep 600", timeout_s=60, keep_bytes=100)
    waiting = sandbox.start("shell", name="main", command="echo", timeout_s=60, keep_bytes=100)
    closing = sandbox.start("close_shell", name="main")
    assert short(sandbox.answer(running)) == (-9, b"", "lost")
    assert sandbox.answer(waiting)["error"] == "refused"
    assert sandbox.answer(closing)["end"] is True
    assert sandbox.call("close_shell", name="never opened")["end"] is True


@pytest.mark.bwrap
def test_a_sandbox_without_bash_does_not_support_shells(tmp_path: Path) -> None:
    hidden = [f"{folder}/bash" for folder in ("/usr/bin", "/bin") if Path(folder, "bash").exists()]
    masks = [part for path in hidden for part in ("--ro-bind", "/dev/null", path)]
    with started(tmp_path, prefix=("bwrap", "--dev-bind", "/", "/", *masks)) as sandbox:
        answer = sandbox.shell("echo")
        assert (answer["error"], "bash" in answer["text"]) == ("unsupported", True)
