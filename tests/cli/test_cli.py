"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import orjson
import pytest

import envkit
from envkit import cli
from envkit.cli.exits import as_exit_code
from envkit.errors import ConfigError, EnvError, OptionError, UnreachableError, UsageError
from tests.cli.commands import envkit as envkit_command
from tests.programs.program import SCRIPT

Output: TypeAlias = tuple[int, str, str]
Call: TypeAlias = Callable[..., Output]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process; gives its exit code, output and errors."""

    def run(*words: str | Path) -> Output:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run


def a_file(folder: Path, text: str = "env: {id: FrozenLake-v0}") -> Path:
    path = folder / "lake.yaml"
    path.write_text(text)
    return path


def test_the_version_is_that_of_the_package() -> None:
    assert envkit_command("--version") == (0, f"envkit {envkit.__version__}\n", "")


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from envkit.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'rich', 'uvicorn', 'yaml', 'orjson', 'anyio'}\n"
        "print('heavy:', *sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert {"train", "check", "eval", "play", "serve", "list"} <= set(words)
    assert words[-1] == "heavy:"


def test_an_interrupt_during_startup_ends_the_program_without_output() -> None:
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer':\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from envkit.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_list_shows_each_environment_with_its_summary(call: Call) -> None:
    code, out, err = call("list")
    assert (code, err) == (0, "")
    assert any(line.startswith("Sokoban-v0 ") and line.endswith(".") for line in out.splitlines())


def test_list_shows_what_an_environment_has_without_playing_it(call: Call) -> None:
    code, out, err = call("list", "WebShop-v0")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "splits: train, validation, eval" in lines
    assert "players: random, expert, nop, first_hit, rule" in lines
    assert "data: webshop, webshop-1k, webshop-100k, webshop-files" in lines
    assert [line.split() for line in lines[-9:-6]] == [
        ["OPTION", "DEFAULT"],
        ["rules", '"strict"'],
        ["observation", '"text_rich"'],
    ]


def test_the_options_of_an_environment_with_tools_include_the_limits(call: Call) -> None:
    code, out, _ = call("list", "Terminal-v0")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["needs:", "sandbox"] in rows
    assert ["mode", '"bash"'] in rows
    assert ["command_timeout_s", "60.0"] in rows


def test_the_shell_completes_environments_and_folders_of_runs(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def completed(words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        return call()[1].splitlines()

    monkeypatch.setenv("_ENVKIT_COMPLETE", "complete_bash")
    monkeypatch.chdir(tmp_path)
    for folder, name in (("runs/lake", "config.yaml"), ("found", "episodes.jsonl"), ("other", "notes.txt")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).touch()
    for command in ("list", "eval", "play"):
        assert completed(f"envkit {command} Sokoban") == [
            *("Sokoban-v0", "SokobanDifferentGridVocab-v0", "SokobanEasy-v0", "SokobanHard-v0")
        ]
    assert completed("envkit show ") == ["found/", "runs/lake/"]
    assert completed("envkit show runs/l") == ["runs/lake/"]


def test_a_closed_output_pipe_ends_the_program_without_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([SCRIPT, "--version"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_is_reported_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([SCRIPT, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "No space left on device; free some space\n")


def test_a_file_that_can_be_trained_with_is_ok(call: Call, tmp_path: Path) -> None:
    assert call("check", a_file(tmp_path)) == (0, "ok\n", "")


def test_every_problem_of_a_file_is_a_line_that_begins_with_its_key(call: Call, tmp_path: Path) -> None:
    file = a_file(tmp_path, "env: {id: FrozenLake-v0, num_env: 4}\nrollout: {group_size: 0}\nseeds: 3\n")
    code, out, err = call("check", file)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "env.num_env: no such key; did you mean 'num_envs'?",
        "rollout.group_size: must be at least 1, got 0",
        "seeds: no such key; did you mean 'seed'?",
    ]


def test_serve_prints_ready_serves_clients_and_ends_on_a_signal(call: Call, tmp_path: Path) -> None:
    settings = ["--state", str(tmp_path), "--set", "envs.sandboxes=1", "--set", "envs.warm=0"]
    with subprocess.Popen(
        [SCRIPT, "serve", "--port", "0", *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            ready, url = server.stdout.readline().split()
            words = ["eval", "FrozenLake-v0", "--policy", "expert", "--episodes", "5", "--json"]
            here, there = call(*words), call(*words, "--url", url)
        finally:
            server.send_signal(signal.SIGINT)
            rest, errors = server.communicate(timeout=120)

    assert (ready, server.returncode, rest) == ("ready", 0, "")
    about, capacity, tools, *log = errors.splitlines()
    assert [line.partition(":")[0] for line in (about, capacity, tools)] == ["sandboxes", "capacity", "trusted worker"]
    assert [orjson.loads(line)["path"] for line in log if line.startswith("{")] == ["/v1/ws"]
    assert orjson.loads(here[1])["metrics"] == orjson.loads(there[1])["metrics"]


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (ConfigError(["a: one", "b: two"]), 2, ["a: one", "b: two"]),
        (OptionError("slip", "too much"), 2, ["slip: too much"]),
        (UnreachableError("nothing answers\nat all"), 1, ["nothing answers at all"]),
        (ExceptionGroup("", [ExceptionGroup("", [UsageError("no")]), UsageError("no")]), 2, ["no"]),
        (ExceptionGroup("", [UsageError("no"), EnvError("A-v0", "x")]), 1, ["no", "A-v0 raised x"]),
        (
            ModuleNotFoundError(name="torch.nn"),
            2,
            ['the package torch is not installed; install it: pip install "envkit[train]"'],
        ),
        (
            ModuleNotFoundError(name="uvicorn"),
            2,
            ['the package uvicorn is not installed; install it: pip install "envkit[serve]"'],
        ),
        (BaseExceptionGroup("", [KeyboardInterrupt()]), 130, []),
    ],
)
def test_errors_become_lines_and_exit_codes_in_one_place(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, lines: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended, as_exit_code():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("error", [ValueError("a fault"), ModuleNotFoundError(name="envkit.nowhere")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)), as_exit_code():
        raise error
