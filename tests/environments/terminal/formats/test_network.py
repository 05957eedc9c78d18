"""Tests that need the network are found, and those that only look like it are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.environments.terminal.formats import NetworkUse, network_uses, read_task
from tests.environments.terminal.formats.folders import harbor

TEMPLATE = """#!/bin/bash
# Install curl
apt-get update
apt-get install -y curl

curl -LsSf https://astral.sh/uv/0.7.13/install.sh | sh
source $HOME/.local/bin/env
if [ "$PWD" = "/" ]; then
    exit 1
fi
uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  pytest /tests/test_outputs.py -rA
"""


def uses(folder: Path, script: str, **files: str) -> list[NetworkUse]:
    more = {f"tests/{name}.sh": content for name, content in files.items()}
    return network_uses(read_task(harbor(folder, "", {"tests/test.sh": script, **more})))


def test_a_script_that_installs_its_tools_is_reported_with_each_command(tmp_path: Path) -> None:
    found = uses(tmp_path, TEMPLATE)

    assert {use.file for use in found} == {tmp_path / "tests/test.sh"}
    assert [(use.line, use.command.split()[:2]) for use in found] == [
        (3, ["apt-get", "update"]),
        (4, ["apt-get", "install"]),
        (6, ["curl", "-LsSf"]),
        (11, ["uvx", "-p"]),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "cd /app && pip3 install -q pytest",
        "python3 -m pip install pytest",
        "DEBIAN_FRONTEND=noninteractive apt -y install jq",
        "if ! uv pip install pytest; then exit 1; fi",
        "x=$(curl -s https://example.org)",
        'bash -c "npm ci"',
        "sudo apk add --no-cache bash",
        "timeout 60 wget http://example.org/file",
        "git clone --depth 1 https://github.com/a/b",
        "/usr/bin/cargo install ripgrep",
        "uv run --with pytest pytest",
    ],
)
def test_a_command_is_found_wherever_a_shell_would_run_it(line: str, tmp_path: Path) -> None:
    assert len(uses(tmp_path, f"#!/bin/sh\n{line}\n")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "# pip install pytest",
        "echo 'run pip install pytest first'",
        "curl -s http://localhost:8080/x http://127.0.0.1/",
        "curl -s $URL",
        "pip install --no-index --find-links=/wheels pytest",
        "git clone /srv/repo.git /tmp/repo",
        "grep curl /app/https://example.org",
        "pipe install",
        "my-apt-get install",
    ],
)
def test_a_command_that_needs_no_network_is_not_reported(line: str, tmp_path: Path) -> None:
    assert uses(tmp_path, f"#!/bin/sh\n{line}\n") == []


def test_scripts_beside_the_test_script_are_read_too(tmp_path: Path) -> None:
    (found,) = uses(tmp_path, "sh /tests/tools.sh\n", tools="\npip install pytest\n")
    assert found == NetworkUse(tmp_path / "tests/tools.sh", 2, "pip install pytest")
