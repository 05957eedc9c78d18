"""Every command that the documents print is in the table ``commands.toml`` and passes the check named there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

import envkit
from envkit import cli
from tests.cli.commands import called
from tests.docs.commands import ROOT, printed
from tests.docs.installed import bin_folder

pytestmark = pytest.mark.xdist_group("installed")  # one worker makes the virtual environment

TABLE = Path(__file__).with_name("commands.toml")
PRINTED = {one.key: one for one in printed()}
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Row:
    """How a command is checked: run, called or shown, with which settings, and which component it needs."""

    mark: str
    settings: Sequence[str] = ()
    needs: str | None = None

    @classmethod
    def of(cls, key: str, value: str | Mapping[str, Any]) -> Row:
        row = {"mark": value} if isinstance(value, str) else dict(value)
        settings, needs = row.pop("set", ()), row.pop("needs", None)
        mark = row.pop("mark", "run" if settings else None)
        assert mark in ("run", "called", "shown"), f"{TABLE.name}: {key}: mark must be run, called or shown"
        assert not row, f"{TABLE.name}: {key}: unknown: {row}"
        return cls(mark, settings, needs)


ROWS = {key: Row.of(key, value) for key, value in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()}


def known(mark: str) -> list[Any]:
    """Return the commands that are printed and in the table; the component that one needs is a pytest mark."""
    return [
        pytest.param(key, id=key, marks=[getattr(pytest.mark, row.needs)] if row.needs else [])
        for key, row in ROWS.items()
        if key in PRINTED and row.mark == mark
    ]


def test_every_printed_command_is_in_the_table() -> None:
    lines = [f'{json.dumps(one.key)} = "shown" # {one.place}' for key, one in PRINTED.items() if key not in ROWS]
    assert not lines, (
        f'add these lines to {TABLE.relative_to(ROOT)}, with "run" or {{ set = ["key=value"] }} where that works:\n'
        + "\n".join(lines)
    )


def test_every_command_of_the_table_is_in_a_document() -> None:
    lines = [json.dumps(key) for key in ROWS if key not in PRINTED]
    assert not lines, f"remove these lines from {TABLE.relative_to(ROOT)}; no document prints them:\n" + "\n".join(
        lines
    )


@pytest.mark.parametrize("key", known("run"))
def test_a_printed_command_runs_after_make_install(key: str, tmp_path: Path) -> None:
    one, folder = PRINTED[key], bin_folder()
    (tmp_path / ".venv").symlink_to(folder.parent)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    settings = shlex.join(word for setting in ROWS[key].settings for word in ("--set", setting))
    if key.startswith("python: "):
        (tmp_path / "program.py").write_text(f"import envkit\n{one.text}", encoding="utf-8")
        command = "python -W error program.py"
    else:
        command = f"{one.text} {settings}"
    code, output = run(command, tmp_path, until="ready " if key.startswith("envkit serve") else None)
    assert code == 0, f"{one.place}: exit code {code}:\n{output}"
    assert "Traceback" not in output


@pytest.mark.parametrize("key", known("called"))
def test_a_printed_command_of_envkit_ends_without_an_error(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called in this process. That the installed packages are enough for such a command, another one shows."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    program, *words = shlex.split(PRINTED[key].text)
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        code, output, errors = called(*words, cwd=tmp_path, HOME=str(tmp_path))
    assert (program, code) == ("envkit", 0), f"{PRINTED[key].place}: exit code {code}:\n{output}{errors}"


@pytest.mark.parametrize("key", known("shown"))
def test_a_printed_command_that_is_not_run_can_still_be_parsed(key: str) -> None:
    text = PRINTED[key].text
    if key.startswith("python: "):
        compile(text, PRINTED[key].place, "exec")
        return
    words = shlex.split(re.sub(r"^(\w+=\S* )+", "", text))  # without variables
    program = words[0].rpartition("/")[2]
    if program == "envkit":
        parse(words[1:])
    elif program == "make":
        done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        named = re.search(r"\[([\w,-]+)\]", text)
        assert set(named[1].split(",") if named else ()) <= set(extras)


@pytest.mark.slow
def test_the_training_file_of_the_shop_trains(tmp_path: Path) -> None:
    with envkit.make("WebShop-v0", catalogue="webshop-1k") as shop:
        shop.reset(seed=0)  # the first one builds the shop, with messages
    settings = (
        *("trainer.steps=1", "trainer.groups_per_step=2", "threads=1", "env.num_envs=32"),
        *("env.options.catalogue=webshop-1k", "engine.hidden_size=16", "engine.layers=1"),
        *("imitation.states=20", "imitation.updates=2", "imitation.batch=8"),
        *("imitation.check_episodes=4", "evaluation.episodes=4"),
    )
    words = [word for setting in settings for word in ("--set", setting)]
    code, _, errors = called("train", ROOT / "examples/webshop.yaml", "--output", "run", *words, cwd=tmp_path)
    assert (code, errors) == (0, "")
    assert (tmp_path / "run/summary.json").exists()


def run(command: str, folder: Path, until: str | None) -> tuple[int, str]:
    """Run a command in `folder`, with an empty home; return its exit code and output.

    Args:
        command: A command line of bash.
        folder: Its home and current folder.
        until: Start of the line after which it is interrupted; None waits for its end.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ENVKIT_", "PYTHON"))}
    env |= {"PATH": f"{bin_folder()}:{env['PATH']}", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    env["MPLCONFIGDIR"] = str(bin_folder().parent / "matplotlib")  # its list of fonts takes seconds in an empty home
    words = ["bash", "-c", f"exec {command}" if until else command]
    output = ""
    with subprocess.Popen(
        words,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            if until:
                while (line := process.stdout.readline()) and not line.startswith(until):
                    output += line
                process.send_signal(signal.SIGINT)
            output += process.communicate(timeout=TIMEOUT_S)[0]
        finally:
            process.kill()
    return process.returncode, output


def parse(words: Sequence[str]) -> None:
    """Parse the words of an envkit command without running it; raise on a wrong command line."""
    command: Any = typer.main.get_command(cli.app)
    rest, name = list(words), "envkit"
    while hasattr(command, "resolve_command"):
        context = command.make_context(name, rest)
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, rest)
