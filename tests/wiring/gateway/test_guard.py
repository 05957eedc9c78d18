"""Options that only the user sets: what they are, and that neither clients nor files of others choose them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import envkit
from envkit.errors import OptionError, UsageError
from envkit.registry import OPERATOR_OPTIONS, register
from envkit.types import JSON, Task
from envkit.wiring.catalogue import load_catalogue
from envkit.wiring.environments import find, refuse_foreign
from envkit.wiring.gateway.trusted import refuse_operator_options


def test_a_client_cannot_choose_files_of_the_server_nor_images() -> None:
    register("Guarded-v0", "nowhere:Env", options={"file": "rows.jsonl"}, operator_options=["scratch"])
    cases: list[tuple[str, str, JSON]] = [
        ("Questions-v0", "file", "/dev/zero"),
        ("Sokoban-v0", "level_file", "/etc/passwd"),
        ("Code-v0", "image", "any"),
        ("SWE-v0", "review", "/tmp"),
        ("Guarded-v0", "file", "other"),
        ("Guarded-v0", "scratch", "/"),
    ]
    for env_id, name, value in cases:
        with pytest.raises(OptionError, match=rf"^{name}: only the operator of the server may set it"):
            refuse_operator_options(Task(env_id, 0, {name: value}))
    refuse_operator_options(Task("Guarded-v0", 0, {"file": "rows.jsonl", "level": 1}))
    refuse_operator_options(Task("Code-v0", 0, {"image": None}))
    refuse_operator_options(Task("OnlyInTheImage-v0", 0, {"level": 1}))


def test_a_file_of_others_cannot_choose_them_either() -> None:
    found: dict[str, JSON] = {"image": "/", "level": 1}
    with pytest.raises(UsageError, match=r"the recording sets image, .* add: --option 'image=\"/\"'"):
        refuse_foreign("Code-v0", found, {}, "the recording")
    refuse_foreign("Code-v0", found, {"image": "mine"}, "the recording")


_PATHS = {"level_file", "review", "tasks", "file"}
_MACHINE = {"image", "keep_processes", "network"}


def test_every_option_that_is_a_path_or_chooses_a_part_of_the_machine_is_the_operators() -> None:
    """An option is a path if its environment checks it with `check_path`."""
    checked = set[str]()
    for file in Path(inspect.getfile(find), "../../../environments").resolve().rglob("*.py"):
        source = file.read_text()
        checked.update(re.findall(r'check_path\("(\w+)"', source))
    assert checked == _PATHS
    built_in = [spec.operator_options for spec in load_catalogue()]
    assert OPERATOR_OPTIONS.union(*built_in) == _PATHS | _MACHINE


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tmp_path.joinpath("f").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    with envkit.make("Questions-v0", file="~/f") as env:
        assert env.reset(seed=0)[0]
