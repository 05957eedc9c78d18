"""Episodes: preparation of the sandbox, steps, submission, verification, and which task belongs to a seed."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envkit import clock
from envkit.environments.terminal import Terminal, TerminalTasks
from envkit.environments.terminal.options import options_of
from envkit.environments.terminal.verifier import VerifierError
from envkit.environments.tools import write_call
from envkit.errors import OptionError, SandboxError, SandboxRefusedError
from envkit.types import JSON, ExecResult
from envkit.wiring.sandboxes.backends import open_tool_pool
from tests.environments.terminal.formats.folders import harbor
from tests.environments.tools.pools import pool_of
from tests.sandbox.fake.backend import Fate

from .tiny import SOLUTION, write_steps, write_tiny

SUBMIT = write_call("submit")


def bash(command: str) -> str:
    return write_call("bash", command=command)


def played(
    folder: Path, *actions: str, logs: list[str] | None = None, **options: Any
) -> tuple[list[str], float | None]:
    """Play an episode of a folder of tasks; return what was observed and the grade. `logs` gets the verifier's log."""

    async def main() -> tuple[list[str], float | None]:
        async with open_tool_pool("local") as pool:
            env = Terminal(sandboxes=pool, tasks=str(folder), **options)
            start = await env.reset(seed=0, options={})
            seen = [start.observation.text]
            try:
                for action in actions:
                    seen.append((await env.step(action)).observation.text)
                return seen, await env.grade()
            finally:
                (logs if logs is not None else []).append(env.grader_output)
                await env.close()

    return clock.run(main)


@pytest.mark.bwrap
def test_the_sandbox_holds_the_prepared_files_and_no_tests(tmp_path: Path) -> None:
    seen, reward = played(write_tiny(tmp_path), bash("ls -A; cat data.txt; id -u; ls /tmp /run/envkit-grader"), SUBMIT)
    assert "Count the lines of data.txt." in seen[0]
    assert seen[1].split()[:5] == ["data.txt", "1", "2", "3", "1000"]
    assert "check" not in seen[1]
    assert reward == 0.0


@pytest.mark.bwrap
def test_a_generated_task_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def main() -> float | None:
        async with open_tool_pool("local") as pool:
            env = Terminal(sandboxes=pool, families=["text"], difficulty=1)
            await env.reset(seed=0, options={})
            await env.step(SUBMIT)
            return await env.grade()

    assert clock.run(main) == 0.0
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bwrap
def test_a_truncated_episode_is_verified(tmp_path: Path) -> None:
    seen, reward = played(write_tiny(tmp_path), bash(SOLUTION), max_turns=1)
    assert "limit is 1 turns" in seen[1]
    assert reward == 1.0


@pytest.mark.bwrap
def test_a_script_is_the_whole_episode(tmp_path: Path) -> None:
    seen, reward = played(write_tiny(tmp_path), f"I would run this:\n```bash\n{SOLUTION}```", mode="script")
    assert "```bash block" in seen[0]
    assert reward == 1.0


@pytest.mark.bwrap
def test_an_episode_chooses_the_mode(tmp_path: Path) -> None:
    async def main() -> list[tuple[list[str], bool]]:
        async with open_tool_pool("local") as pool:
            env = Terminal(sandboxes=pool, tasks=str(write_tiny(tmp_path)))
            found = []
            for mode in ("screen", "script", "bash"):
                start = await env.reset(seed=0, options={"mode": mode})
                names = [tool["function"]["name"] for tool in start.tools]
                found.append((names, "tool_call_ok" in env.metrics))
                await env.close()
            return found

    names = ["bash", "view_file", "edit_file", "submit"]
    assert clock.run(main) == [(["type_keys", "submit"], True), ([], False), (names, True)]


@pytest.mark.bwrap
def test_services_run_from_the_start_of_an_episode(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, services="nohup sh -c 'while :; do date > beat; sleep 0.1; done' > /dev/null 2>&1 &\n")
    seen, _ = played(path, bash("sleep 0.3; rm beat; sleep 0.3; ls beat"))
    assert seen[1].startswith("beat")


@pytest.mark.bwrap
def test_a_failing_healthcheck_names_the_task(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, services="echo no port >&2; exit 1")
    with pytest.raises(SandboxError, match="envkit/tiny: its healthcheck failed 1 times: no port"):
        played(path, SUBMIT)


def test_a_healthcheck_with_endless_retries_fails_after_ten_minutes(tmp_path: Path) -> None:
    healthcheck = '[environment.healthcheck]\ncommand = "false"\ninterval_sec = 5\nretries = 1000\n'
    harbor(tmp_path, f'[environment]\ndocker_image = "x"\nworkdir = "/app"\n{healthcheck}')

    async def main() -> None:
        async with pool_of(Fate(answer=lambda command: ExecResult(1))) as (pool, _):
            with pytest.raises(SandboxError, match=r"its healthcheck failed 12\d times"):
                await Terminal(sandboxes=pool, tasks=str(tmp_path)).reset(seed=0, options={})

    clock.run(main, virtual=True)


def test_a_strict_task_is_played_in_the_working_directory_of_its_image(tmp_path: Path) -> None:
    harbor(tmp_path, '[environment]\ndocker_image = "x"\n[metadata.envkit]\nprofile = "strict"\n')
    fate = Fate(answer=lambda command: ExecResult(0, b"/app\n" if "$ENVKIT_WORKDIR" in str(command) else b""))

    async def main() -> None:
        async with pool_of(fate) as (pool, _):
            env = Terminal(sandboxes=pool, tasks=str(tmp_path))
            start = await env.reset(seed=0, options={})
            assert (start.info["folder"], env.task.task.workdir) == ("/app", "/app")
            assert "Work on this task in /app " in start.observation.text
            await env.close()

    clock.run(main, virtual=True)


@pytest.mark.bwrap
def test_a_missing_program_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, programs=("no-such-program",))
    with pytest.raises(SandboxRefusedError, match="envkit/tiny needs no-such-program in the sandbox"):
        played(path, SUBMIT)


@pytest.mark.bwrap
@pytest.mark.parametrize("check", ["def verify(): raise SystemExit", "import os\ndef verify(): os._exit(0)"])
def test_a_missing_reward_is_an_error_and_a_failing_check_is_0(tmp_path: Path, check: str) -> None:
    path = write_tiny(tmp_path, check=check)
    if "_exit" in check:
        with pytest.raises(VerifierError, match=r"envkit/tiny: .*reward"):
            played(path, SUBMIT)
    else:
        assert played(path, SUBMIT)[1] == 0.0


@pytest.mark.bwrap
def test_a_reward_that_only_the_agents_work_prevents_is_0(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, check="import os\ndef verify(): os.path.exists('/workspace/break') and os._exit(0)\n")
    assert played(path, SUBMIT)[1] == 1.0
    logs: list[str] = []
    assert played(path, bash("touch break"), SUBMIT, logs=logs)[1] == 0.0
    assert "The tests write a reward if the agent has done nothing" in logs[0]


@pytest.mark.bwrap
def test_tests_whose_first_line_is_no_interpreter_are_run_by_bash(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    script = (
        '# a canary\n#!/bin/sh\n[[ $(< data.txt) == *3* ]]; echo $((1 - $?)) > "$ENVKIT_LOGS/verifier/reward.txt"\n'
    )
    (path / "tests/test.sh").write_text(script.replace("data.txt", "/workspace/data.txt"))
    assert played(path, SUBMIT)[1] == 1.0


@pytest.mark.bwrap
def test_tests_with_other_line_ends_are_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    (path / "tests/test.sh").write_bytes(b"#!/bin/sh\r\nexit 0\r\n")
    with pytest.raises(VerifierError, match=r"test.sh has CR LF line ends; convert it to LF"):
        played(path, SUBMIT)


@pytest.mark.bwrap
def test_processes_that_cannot_be_ended_after_a_check_earn_0(tmp_path: Path) -> None:
    check = """
import __main__
def fail(): raise BlockingIOError("there are too many processes")
def verify(): __main__.end_agent = fail
"""
    assert played(write_tiny(tmp_path, check=check), SUBMIT)[1] == 0.0


@pytest.mark.bwrap
def test_tests_that_exceed_the_memory_earn_0(tmp_path: Path) -> None:
    check = "def verify():\n    parts = []\n    while True: parts.append(b'x' * (16 << 20))\n"
    path = write_tiny(tmp_path, check=check)
    _replace(path / "task.toml", "memory_mb = 512", "memory_mb = 128")
    assert played(path, SUBMIT)[1] == 0.0


@pytest.mark.bwrap
def test_programs_of_the_agent_cannot_reach_tests_or_reward(tmp_path: Path) -> None:
    check = """
from harness import require, run
def verify():
    done = run(["sh", "tool.sh"])
    require(done.stdout.split() == ["1000", "denied"] and done.stderr.count("denied") == 2, str(done))
"""
    folder = "/run/envkit-grader"
    tool = (
        f"id -u; cat {folder}/tests/check.py; echo 1 > {folder}/logs/verifier/reward.txt; kill -9 $PPID || echo denied"
    )
    seen, reward = played(write_tiny(tmp_path, check=check), bash(f"echo '{tool}' > tool.sh"), SUBMIT)
    assert reward == 1.0, seen


@pytest.mark.bwrap
def test_a_shared_verifier_sees_the_sandbox_without_the_agents_processes(tmp_path: Path) -> None:
    check = """
from harness import read, require
import os, subprocess
def verify():
    require(read("/tmp/outside") == "seen\\n", "no file")
    names = [open(f"/proc/{pid}/cmdline").read() for pid in os.listdir("/proc") if pid.isdecimal()]
    require(not any("1234" in name for name in names), "a process is left")
"""
    path = write_tiny(tmp_path, check=check)
    command = bash(
        "echo seen > /tmp/outside; (setsid sleep 1234 &) > /dev/null 2>&1; nohup sleep 1234 > /dev/null 2>&1 &"
    )
    assert played(path, command, SUBMIT)[1] == 0.0  # by default, only the working directory is seen
    shared = path.rename(tmp_path / "shared")
    _replace(shared / "task.toml", "[verifier]\n", '[verifier]\nenvironment_mode = "shared"\n')
    assert played(shared, command, SUBMIT)[1] == 1.0


@pytest.mark.bwrap
def test_each_step_is_verified_and_the_reward_is_their_mean(tmp_path: Path) -> None:
    path = write_steps(tmp_path)
    seen, reward = played(path, bash("touch one"), SUBMIT, bash("ls; touch two"), SUBMIT)
    assert "Make the file two." in seen[2]
    assert "one" in seen[3].split()
    assert reward == 1.0
    assert played(path, bash("touch one"), SUBMIT, SUBMIT)[1] == 0.5


@pytest.mark.bwrap
def test_each_step_has_its_own_time(tmp_path: Path) -> None:
    path = write_steps(tmp_path)
    with (path / "task.toml").open("a") as file:
        file.write("[steps.agent]\ntimeout_sec = 1.5\n")  # of the second step
    seen, _ = played(path, bash("sleep 2; echo first"), SUBMIT, bash("echo second"), bash("sleep 5"))
    assert seen[1].startswith("first")
    assert seen[3].startswith("second")
    assert "used up" in seen[4]


@pytest.mark.bwrap
def test_a_step_below_its_minimum_ends_the_episode(tmp_path: Path) -> None:
    path = write_steps(tmp_path, min_reward=1.0)
    seen, reward = played(path, SUBMIT)
    assert len(seen) == 2
    assert reward == 0.0


@pytest.mark.bwrap
def test_a_step_may_have_a_setup_of_its_own_which_the_agent_can_break(tmp_path: Path) -> None:
    path = write_steps(tmp_path)
    (path / "steps/two/workdir").mkdir()
    (path / "steps/two/workdir/setup.sh").write_text("mkdir two\n")
    _, reward = played(path, bash("touch one"), SUBMIT, bash("rmdir two && touch two"), SUBMIT)
    assert reward == 1.0
    seen, reward = played(path, bash("touch one two"), SUBMIT)
    assert "The next one cannot begin: envkit/tiny (two): its setup failed: mkdir" in seen[2]
    assert reward == 0.5


@pytest.mark.bwrap
def test_a_script_for_each_step_and_the_reward_of_the_last_one(tmp_path: Path) -> None:
    path = write_steps(tmp_path)
    file = path / "task.toml"
    file.write_text(f'multi_step_reward_strategy = "final"\n{file.read_text()}')
    seen, reward = played(path, "true", "touch two", mode="script")
    assert "Make the file two." in seen[1]
    assert reward == 1.0
    assert played(path, "touch one", mode="script")[1] == 0.0


@pytest.mark.bwrap
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("truncate -s 20G large", "larger than 64 MiB"),
        ("ln -s /etc x; ln -s / y", "answer.txt cannot be read"),
    ],
)
def test_artifacts_that_cannot_be_taken_earn_0(tmp_path: Path, command: str, reason: str) -> None:
    logs: list[str] = []
    assert played(write_tiny(tmp_path), bash(command), SUBMIT, logs=logs)[1] == 0.0
    assert reason in logs[0]


@pytest.mark.bwrap
def test_missing_artifacts_and_files_that_cannot_be_read_do_not_hide_others(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    _replace(path / "task.toml", '"1.4"\n', '"1.4"\nartifacts = ["/tmp/x", "/tmp/no/folder", "/workspace"]\n')
    assert played(path, bash(f"{SOLUTION}mkdir d; touch d/x; chmod 644 d"), SUBMIT)[1] == 1.0


@pytest.mark.bwrap
def test_artifacts_are_not_unpacked_below_links_of_others(tmp_path: Path) -> None:
    check = "import os\nfrom harness import require\ndef verify(): require(not os.path.exists('/tmp/bin/x'), 'it is')\n"
    path = write_tiny(tmp_path, check=check)
    _replace(path / "task.toml", '"1.4"\n', '"1.4"\nartifacts = ["/workspace", "/workspace/out/bin"]\n')
    assert played(path, bash("mkdir /tmp/bin; touch /tmp/bin/x; ln -s /tmp out"), SUBMIT)[1] == 1.0


def test_the_own_tasks_are_a_test_set() -> None:
    assert TerminalTasks(tasks="own").splits == ("eval", "any")
    with pytest.raises(OptionError, match="test set"):
        options_of({"tasks": "own", "split": "train"}).all()


def test_generated_tasks_of_a_split_are_in_no_other() -> None:
    def instructions(split: str) -> set[str]:
        chosen = options_of({"split": split, "difficulty": 2})
        return {chosen.task(seed).instruction for seed in range(20)}

    train, held_out = instructions("train"), instructions("eval")
    assert len(train) >= 15
    assert not train & held_out


def test_families_are_split_too() -> None:
    train = set(options_of({"families": "train"}).family_names)
    held_out = set(options_of({"families": "held_out"}).family_names)
    assert train
    assert held_out
    assert not train & held_out
    assert train | held_out == set(options_of({"families": "all"}).family_names)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"families": "txet"}, "there is no family 'txet'"),
        ({"families": []}, "at least one"),
        ({"difficulty": 6}, "from 1 to 5"),
        ({"mode": "key"}, "'key' is not a known value"),
        ({"image": 3}, "must be the name of an image"),
        ({"tasks": 3}, "must be the path"),
    ],
)
def test_wrong_options_are_rejected(options: Mapping[str, JSON], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        options_of(options)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.bwrap
def test_the_tests_run_without_settings_and_packages_of_the_agent(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    settings = "[ ! -e ~/.bashrc ] || . ~/.bashrc"
    script = f'#!/bin/bash\n{settings}\ncd "$(dirname "$0")" && bash -lc true; python3 harness.py\n'
    (path / "tests" / "test.sh").write_text(script)
    reward = "/run/envkit-grader/logs/verifier/reward.txt"
    write_reward = f"import atexit\natexit.register(lambda: open({reward!r}, 'w').write('1'))"
    commands = [
        "d=$(python3 -m site --user-site); mkdir -p $d; cat > $d/usercustomize.py <<'END'\n" + write_reward + "\nEND",
        "echo 'mkdir -p $ENVKIT_LOGS/verifier; echo 1 > $ENVKIT_LOGS/verifier/reward.txt; exit' | tee .bashrc .profile",
    ]
    assert played(path, bash("\n".join(commands)), SUBMIT)[1] == 0.0
    assert played(path, bash(SOLUTION), SUBMIT)[1] == 1.0


@pytest.mark.bwrap
def test_callers_wait_as_long_as_the_tests_may_take(tmp_path: Path) -> None:
    async def main(path: Path) -> tuple[float, float]:
        async with open_tool_pool("local") as pool:
            env = Terminal(sandboxes=pool, tasks=str(path))
            start = await env.reset(seed=0, options={})
            await env.close()
            assert start.grade_limit_s is not None
            assert start.step_limit_s is not None
            return start.grade_limit_s, start.step_limit_s

    one, several = (clock.run(main, path) for path in (write_tiny(tmp_path / "a"), write_steps(tmp_path / "b")))
    moves_s = 8 * 60.0  # of the artifacts and tests; 300 s are for the setup
    assert one == (moves_s + 300.0 + 2 * 60.0, 70.0)  # the tests run again if they write no reward
    assert several == (
        moves_s + 300.0 + 2 * 600.0,
        70.0 + moves_s + 300.0 + 2 * 600.0 + 300.0 + 600.0,
    )  # a step of several contains a verification, a setup and a healthcheck
