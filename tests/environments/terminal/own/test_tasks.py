"""envkit's own tasks: complete, made for a verifier that sees only artifacts, and without hints in what agents see."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from envkit.environments.terminal.formats import read_task
from envkit.environments.terminal.formats.writing import TEST, dockerfile
from envkit.environments.terminal.options import OWN_TASKS
from envkit.environments.terminal.tasks import TerminalTask

FOLDERS = sorted(path.parent for path in OWN_TASKS.glob("*/task.toml"))
SYSTEM = {"service-permissions", "ssh-forced-command"}
HIDDEN = ("PASSWORD", "CULPRIT", "TREE", "LOST", "HIDDEN")
"""Names of constants of checks whose values no agent may see."""


def check_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(OWN_TASKS.parent))  # the folder of `harness`
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location("check", folder / "tests/check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def task(request: pytest.FixtureRequest) -> TerminalTask:
    return read_task(request.param)


def test_there_are_fifteen_of_which_two_need_root() -> None:
    tasks = [read_task(folder) for folder in FOLDERS]
    assert len(tasks) == 15
    assert {task.folder.name for task in tasks if not task.is_portable} == SYSTEM
    assert {task.folder.name for task in tasks if task.profile == "system"} == SYSTEM
    assert {task.difficulty for task in tasks} == {"easy", "medium", "hard"}


def test_a_task_has_a_solution_a_check_and_cheats_and_needs_neither_network_nor_an_image_of_others(
    task: TerminalTask,
) -> None:
    assert task.instruction
    assert task.solution is not None
    assert (task.solution / "solve.sh").read_text().startswith("#!/bin/bash\n")
    assert (task.verifier.tests / "test.sh").read_text() == TEST
    check = ast.parse((task.verifier.tests / "check.py").read_text())
    assert "verify" in {node.name for node in check.body if isinstance(node, ast.FunctionDef)}
    assert task.cheats
    assert (task.notes, task.network, task.verifier.is_separate) == ((), "none", True)
    content = (task.environment / "Dockerfile").read_text()
    assert content.startswith("ARG BASE=debian:bookworm-slim\nFROM ${BASE}\n")
    if task.is_portable:
        assert content == dockerfile(sorted(task.packages), has_setup=bool(task.setup))


def test_what_an_agent_sees_has_no_hidden_value(task: TerminalTask) -> None:
    check = ast.parse((task.verifier.tests / "check.py").read_text())
    hidden: dict[str, Any] = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in check.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in HIDDEN
    }
    assert {node.id for node in ast.walk(check) if isinstance(node, ast.Name) and node.id in HIDDEN} == set(hidden)
    seen = [
        path.read_bytes() for path in [*task.environment.rglob("*"), task.folder / "instruction.md"] if path.is_file()
    ]
    for value in hidden.values():
        words = [str(number) for pair in value for number in pair] if isinstance(value, tuple) else [str(value)]
        assert not any(all(word.encode() in content for word in words) for content in seen), value


@pytest.mark.parametrize(
    ("name", "folder", "files"),
    [
        ("csv-to-sqlite", "sales", lambda check: check.files_of(check.VISIBLE)[1]),
        ("log-triage", "", lambda check: {"access.log": check.log_and_report(check.VISIBLE)[0]}),
        ("postgres-restore", "", lambda check: {"shop.sql": check.dump(check.VISIBLE)}),
    ],
)
def test_visible_files_are_those_of_the_visible_seed(
    name: str, folder: str, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = files(check_of(OWN_TASKS / name, monkeypatch))
    for file, content in made.items():
        assert (OWN_TASKS / name / "environment" / folder / file).read_text() == content
