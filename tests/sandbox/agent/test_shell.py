"""The agent keeps shells: their state stays, their outputs are exact, and nothing that a script does wedges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sandbox.agent.agent_process import Answer, Client, started


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Client]:
    with started(tmp_path) as client:
        yield client


def short(answer: Answer) -> tuple[int | None, bytes, str]:
    return answer["code"], answer.out, answer["state"]


def test_folder_variables_functions_and_the_last_code_stay(box: Client, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    first = box.shell("cd inner; x=1; export y=2; f() { echo $x$y; }; (exit 7)")
    assert short(first) == (7, b"", "kept")
    assert short(box.shell("echo $?; f; pwd")) == (0, f"7\n12\n{tmp_path}/inner\n".encode(), "kept")


def test_both_outputs_come_back_apart_and_byte_for_byte(box: Client) -> None:
    answer = box.shell("printf 'a\\rb\\0\\377\\n'; printf 'no newline' >&2")
    assert (answer.out, answer.err) == (b"a\rb\0\xff\n", b"no newline")


def test_shells_of_two_names_are_two(box: Client) -> None:
    box.shell("x=one", name="a")
    assert box.shell("echo ${x-none}", name="b").out == b"none\n"
    assert box.shell("echo ${x-none}", name="a").out == b"one\n"


SCRIPTS = {
    "nothing": ("", 0, b""),
    "comment": ("echo a # b", 0, b"a\n"),
    "its own sentinel": ("printf '0\\0'; false", 1, b"0\0"),
    "heredoc": ("cat <<'EOF'\na b\n$x\nEOF\nfor i in 1 2; do echo $i; done", 0, b"a b\n$x\n1\n2\n"),
    "heredoc without end": ("cat <<EOF\na", 0, b"a\n"),
    "unicode": ("x='h\u00e9llo \u4f60'; printf %s \"$x\"", 0, "h\u00e9llo \u4f60".encode()),
    "many characters of several bytes": ("echo " + "\u4f60" * 40_000, 0, "\u4f60".encode() * 40_000 + b"\n"),
    "syntax error": ("if then", 2, b""),
    "unclosed quote": ("echo 'a", 2, b""),
    "reading its input": ("cat; read x; echo $?", 0, b"1\n"),
    "changed prompts": ("PS1='> '; PS2=x; PS4='? '; PROMPT_COMMAND='echo no'", 0, b""),
    "no path": ("unset PATH; echo a", 0, b"a\n"),
    "trap": ("trap 'echo bye' EXIT; trap '' TERM INT HUP", 0, b""),
    "closed files 8 and 9": ("exec 8>&- 9<&-; echo a", 0, b"a\n"),
    "other files 8 and 9": ("exec 8>/dev/null 9</dev/null; echo a", 0, b"a\n"),
    "its input closed": ("exec 0<&-; echo a", 0, b"a\n"),
    "changed separators": ("IFS=1234567890; x='a1b'; echo $x", 0, b"a b\n"),
    "unset variables are errors": ("set -u; echo a", 0, b"a\n"),
    "nothing is overwritten": ("set -C; echo a", 0, b"a\n"),
    "other names of builtins": ("alias eval=false; eval() { false; }; read() { false; }; printf() { false; }", 0, b""),
    "a locale": ("export LC_ALL=C.UTF-8; x='\u4f60\u4f60'; echo ${#x}", 0, b"2\n"),
    "posix": ("set -o posix; echo a", 0, b"a\n"),
    "pipefail": ("set -o pipefail; false | true", 1, b""),
    "errors counted": ("set -e; false || echo a", 0, b"a\n"),
    "next turn of a loop that is not its own": ("echo a; continue; echo b", 0, b"a\n"),
    "many lines": ("seq 1 200000 | tail -c 7", 0, b"200000\n"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_leaves_a_shell_that_goes_on(box: Client, name: str) -> None:
    script, code, out = SCRIPTS[name]
    assert short(box.shell(script)) == (code, out, "kept")
    # What a script does to one next to it is its own business, but never that there is no answer, or another's.
    assert short(box.shell("builtin echo next")) == (0, b"next\n", "kept")


ENDINGS = {
    "exit": ("echo a; exit 3; echo b", 3, b"a\n"),
    "failure under set -e": ("set -e; echo a; false; echo b", 1, b"a\n"),
    "another program instead": ("exec sh -c 'echo a; exit 4'", 4, b"a\n"),
    "killed": ("echo a; kill -9 $$", -9, b"a\n"),
    "an exit trap": ("trap 'echo bye' EXIT; exit 5", 5, b"bye\n"),
    "an error in an expansion": ("echo ${none?}", 127, b""),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_shell_that_ends_says_how_and_the_next_script_gets_a_new_one(box: Client, name: str) -> None:
    script, code, out = ENDINGS[name]
    box.shell("x=1")
    assert short(box.shell(script)) == (code, out, "lost")
    assert short(box.shell("echo next ${x-gone}")) == (0, b"next gone\n", "kept")


def test_what_xtrace_says_is_about_the_script_alone(box: Client) -> None:
    box.shell("set -x")
    answer = box.shell("echo a")
    assert (answer.out, answer.err) == (b"a\n", b"+ builtin eval 'echo a\n'\n++ echo a\n")


def test_a_deleted_folder_is_no_end(box: Client, tmp_path: Path) -> None:
    assert short(box.shell("mkdir gone; cd gone; rmdir ../gone; echo a")) == (0, b"a\n", "kept")
    assert short(box.shell(f"cd {tmp_path}; pwd")) == (0, f"{tmp_path}\n".encode(), "kept")


def test_a_timeout_ends_what_runs_and_keeps_the_state(box: Client, marker: str, sleepers: Callable[[], int]) -> None:
    box.shell("x=1")
    script = f"echo part; trap '' TERM; (setsid sleep {marker} &) ; sleep {marker}"
    answer = box.shell(script, timeout_s=2)
    assert (answer["code"], answer["timed_out"], answer["state"], answer.out) == (None, True, "kept", b"part\n")
    assert sleepers() == 0
    assert short(box.shell("echo $x")) == (0, b"1\n", "kept")


def test_what_was_late_does_not_leak_into_the_next_answer(box: Client) -> None:
    assert box.shell("sleep 600; echo late", timeout_s=1)["timed_out"]
    assert box.shell("echo next").out == b"next\n"


@pytest.mark.parametrize("loop", ["while :; do :; done", "while :; do sleep 600; done"])
def test_a_loop_without_end_costs_the_shell(box: Client, loop: str) -> None:
    answer = box.shell(f"x=1; {loop}", timeout_s=1)
    assert (answer["timed_out"], answer["state"]) == (True, "lost")
    assert short(box.shell("echo ${x-gone}")) == (0, b"gone\n", "kept")


def test_background_jobs_stay_and_do_not_hold_the_answer_back(
    box: Client, marker: str, sleepers: Callable[[], int]
) -> None:
    assert short(box.shell(f"sleep {marker} & echo started")) == (0, b"started\n", "kept")
    assert short(box.shell("jobs -p | wc -l")) == (0, b"1\n", "kept")
    while sleepers() < 1:  # it may not yet be what it is to become
        assert box.call("ping")["end"] is True
    assert box.call("close_shell", name="main")["end"] is True
    assert sleepers() == 0


def test_what_a_background_job_writes_is_read_all_the_time(box: Client) -> None:
    box.shell("(yes | head -c 3000000; echo done > flag) &")
    answer = box.shell("while [ ! -e flag ]; do sleep 0.01; done", keep_bytes=1000)
    assert (answer["code"], len(answer.out)) == (0, 1000)


def test_the_end_of_a_long_output_is_kept_and_the_rest_counted(box: Client) -> None:
    answer = box.shell("yes | head -c 5000000; echo end; echo error >&2", keep_bytes=1 << 16)
    assert answer.out == b"y\n" * ((1 << 15) - 2) + b"end\n"
    assert (answer.err, answer["cut"]) == (b"error\n", 5_000_004 - (1 << 16))


def test_scripts_of_one_shell_run_in_the_order_of_arrival(box: Client) -> None:
    numbers = [
        box.start("shell", name="main", command=f"sleep 0.0{9 - n}; echo {n}", timeout_s=10, keep_bytes=100)
        for n in range(8)
    ]
    assert [box.answer(number).out for number in numbers] == [f"{n}\n".encode() for n in range(8)]


@pytest.mark.alone  # a shell that is slow to come back from a cancelled script is replaced
def test_a_cancelled_script_is_ended_and_the_next_one_runs(
    box: Client, marker: str, sleepers: Callable[[], int]
) -> None:
    box.shell("x=1")
    running = box.start("shell", name="main", command=f"sleep {marker}", timeout_s=60, keep_bytes=100)
    waiting = box.start("shell", name="main", command="x=2", timeout_s=60, keep_bytes=100)
    following = box.start("shell", name="main", command="echo $x", timeout_s=60, keep_bytes=100)
    while sleepers() < 1:  # a shell that has yet to start it may take longer than it is given, and be lost
        assert box.call("ping")["end"] is True
    box.send({"id": waiting, "cancel": True})
    box.send({"id": running, "cancel": True})
    assert box.answer(running)["end"] is True
    assert box.answer(waiting)["end"] is True
    assert short(box.answer(following)) == (0, b"1\n", "kept")
    assert sleepers() == 0


def test_a_shell_killed_between_two_scripts_says_so(box: Client) -> None:
    box.shell("x=1; echo $$ > shell; (sleep 0.1; kill -9 $$) & ")
    box.sh("while kill -0 $(cat shell); do sleep 0.01; done 2>/dev/null")
    answer = box.shell("echo never")
    assert short(answer) == (-9, b"", "lost")
    assert b"had ended" in answer.err
    assert short(box.shell("echo ${x-gone}")) == (0, b"gone\n", "kept")


def test_killing_the_process_above_a_shell_is_a_loss_and_leaves_nobody(
    box: Client, marker: str, sleepers: Callable[[], int]
) -> None:
    assert short(box.shell(f"sleep {marker} & kill -9 $PPID; sleep {marker}")) == (-9, b"", "lost")
    assert sleepers() == 0
    assert short(box.shell("echo next")) == (0, b"next\n", "kept")


def test_closing_ends_the_script_that_runs_and_refuses_those_that_wait(box: Client) -> None:
    running = box.start("shell", name="main", command="sleep 600", timeout_s=60, keep_bytes=100)
    waiting = box.start("shell", name="main", command="echo", timeout_s=60, keep_bytes=100)
    closing = box.start("close_shell", name="main")
    assert short(box.answer(running)) == (-9, b"", "lost")
    assert box.answer(waiting)["error"] == "refused"
    assert box.answer(closing)["end"] is True
    assert box.call("close_shell", name="never opened")["end"] is True


def test_nul_in_a_script_is_refused(box: Client) -> None:
    assert box.shell("echo \0")["error"] == "bad"
    assert box.shell("echo next").out == b"next\n"


@pytest.mark.bwrap
def test_a_box_without_bash_says_so(tmp_path: Path) -> None:
    hidden = [f"{folder}/bash" for folder in ("/usr/bin", "/bin") if Path(folder, "bash").exists()]
    masks = [part for path in hidden for part in ("--ro-bind", "/dev/null", path)]
    with started(tmp_path, prefix=("bwrap", "--dev-bind", "/", "/", *masks)) as box:
        answer = box.shell("echo")
        assert (answer["error"], "bash" in answer["text"]) == ("unsupported", True)
