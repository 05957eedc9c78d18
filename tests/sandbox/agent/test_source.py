"""The agent's source runs in a sandbox with old Pythons and the standard library alone."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from envkit.sandbox import agent
from envkit.sandbox.agent import framing
from tests.sandbox.agent.agent_process import started

FOLDER = Path(agent.__file__).parent
SENT = sorted(path for path in FOLDER.rglob("*.py") if path.stem != "__init__")


def test_the_modules_are_python_3_8_and_import_only_the_standard_library() -> None:
    outside = {
        name
        for path in SENT
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 8)))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and node.level == 0
            else []
        )
        if name.split(".")[0] not in sys.stdlib_module_names
    }
    assert outside == set()


VERSIONS = ["3.8", "3.13", "3.14"]


def python_of(version: str) -> str | None:
    """Return the path of another Python, also of one that pyenv installed but does not expose."""
    kept = Path(os.environ.get("PYENV_ROOT", "~/.pyenv"), "versions").expanduser().glob(f"{version}.*/bin/python")
    for program in (shutil.which(f"python{version}"), *map(str, kept)):
        if program and not subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode:
            return program
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_another_python_runs_it_from_source(version: str, tmp_path: Path) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    with started(tmp_path, python=python) as sandbox:
        assert sandbox.exec("echo", "a").out == b"a\n"
        assert sandbox.shell("echo b").out == b"b\n"
        assert sandbox.call("write", path="f", mode=0o644, feed=b"c")["end"] is True
        assert sandbox.call("pack", path=".", max_bytes=1 << 20)["end"] is True
        assert sandbox.exec("sleep", "600", timeout_s=0.1)["timed_out"]
        assert sandbox.exec("tty", "-s", pty=[3, 4])["code"] == 0
        assert sandbox.exec("no-such")["code"] == 127


@pytest.mark.parametrize("module", ["_json", "_ctypes"])
def test_a_python_without_a_module_that_the_agent_needs_does_not_start_and_the_error_names_it(module: str) -> None:
    *options, boot = agent.command(sys.executable)
    hide = f"import sys; sys.modules[{module!r}] = None"
    done = subprocess.run([*options, f"{hide}\n{boot}"], input=agent.opening(), capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"the sandbox's Python lacks the module %b of the" % module.encode())


JSON = {
    '{"a": [1, -2.5e3, null, true, false], "b": {}, "c": []}': {"a": [1, -2500.0, None, True, False], "b": {}, "c": []},
    ' {"x\\u00e9\U0001f600\\udc80\\n\\"" :\t"" } ': {'x\u00e9\U0001f600\udc80\n"': ""},
}


def test_json_is_read() -> None:
    assert [framing.loads(text) for text in JSON] == list(JSON.values())


def test_what_is_written_is_json() -> None:
    values = {'a"\\\n\u00e9\U0001f600\udc80\x7f': 'b"\\\n\udc80', "n": None, "t": True, "f": 0.25, "i": -3}
    assert json.loads(framing.dumps(values)) == values
