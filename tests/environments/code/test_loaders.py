"""Problems from files: rows of KodCode and of LiveCodeBench."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from envkit.environments.code import CodeTasks
from envkit.environments.code.loaders import load_problems
from envkit.environments.code.task_set import CodeOptions
from envkit.environments.code.tasks import Case
from envkit.errors import OptionError

KODCODE = {
    "question": "Add two numbers.",
    "solution": "def add(a, b):\n    return a + b",
    "test": "from solution import add\ndef test():\n    assert add(1, -2) == -1\n    assert add([1], []) == [1]\n",
}
STDIN = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
METHOD = {"input": '[1, 2]\n"x"', "output": "true", "testtype": "functional"}


def livecodebench(public: Any, private: Any, **more: Any) -> dict[str, Any]:
    row = {"question_content": "Do it.", "starter_code": "", "metadata": '{"func_name": "doIt"}'}
    return {**row, "public_test_cases": json.dumps(public), "private_test_cases": private, **more}


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def loaded(folder: Path, format: str, *rows: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_problems(str(path), format)


def test_asserts_of_kodcode_become_arguments_and_results(tmp_path: Path) -> None:
    (problem,) = loaded(tmp_path, "kodcode", KODCODE).problems
    assert problem.entry == "add"
    assert problem.tests == [Case((1, -2), -1), Case(([1], []), [1])]
    assert problem.solution == KODCODE["solution"]
    assert "`add`" in problem.text


def test_rows_of_kodcode_with_other_tests_are_skipped_and_counted_by_reason(tmp_path: Path) -> None:
    head = "from solution import add\ndef test():\n    "
    others = [
        "assert add(1) is None",
        "assert add(1) == compute()",
        "assert add(x=1) == 2",
        "assert add(1) == (1, 2)",
        "add(1)",
        "assert (",
    ]
    found = loaded(tmp_path, "kodcode", KODCODE, {"question": ""}, *({**KODCODE, "test": head + one} for one in others))
    assert len(found.problems) == 1
    assert found.skipped == {
        "not a row of kodcode (KeyError: 'test')": 1,
        "an assert does not have the form f(literals) == literal": 3,
        "a literal is not JSON, such as a tuple or set": 1,
        "no asserts": 1,
        "the test is not valid Python": 1,
    }


def test_livecodebench_gives_programs_with_input_and_output(tmp_path: Path) -> None:
    hidden = {**STDIN, "output": "4\n"}
    (problem,) = loaded(tmp_path, "livecodebench", livecodebench([STDIN], packed(json.dumps([hidden])))).problems
    assert problem.entry == ""
    assert problem.examples == [Case(("1 2\n",), "3\n")]
    assert problem.tests == [Case(("1 2\n",), "3\n"), Case(("1 2\n",), "4\n")]


def test_livecodebench_gives_methods_with_arguments_and_result(tmp_path: Path) -> None:
    (problem,) = loaded(tmp_path, "livecodebench", livecodebench([METHOD], json.dumps([METHOD]))).problems
    assert problem.entry == "Solution.doIt"
    assert problem.tests == [Case(([1, 2], "x"), True)] * 2


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    attack = livecodebench([STDIN], packed(Attack(tmp_path / "attacked")))
    mixed = livecodebench([STDIN], json.dumps([METHOD]))
    found = loaded(tmp_path, "livecodebench", attack, mixed, livecodebench([STDIN], "[]"))
    assert not (tmp_path / "attacked").exists()
    assert found.skipped == {
        "the private tests are neither JSON nor a pickled string": 1,
        "the tests are not all of the type stdin, or all functional": 1,
    }


def test_a_file_without_usable_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no row of kodcode that can be used \(not a row of kodcode"):
        loaded(tmp_path, "kodcode", {"question": "?"})
    with pytest.raises(OptionError, match=r"^file: .*none.jsonl: .*No such file"):
        load_problems(str(tmp_path / "none.jsonl"), "kodcode")


def test_rows_with_too_long_results_are_skipped(tmp_path: Path) -> None:
    long = {**STDIN, "output": "x" * (16 << 20)}
    found = loaded(tmp_path, "livecodebench", livecodebench([STDIN], "[]"), livecodebench([long], "[]"))
    assert (len(found.problems), found.skipped) == (1, {"the expected results exceed 16 MiB": 1})


@pytest.mark.parametrize("kind", ["device", "named pipe", "large file"])
def test_only_a_regular_file_of_at_most_1_gib_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.jsonl"
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "named pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, (1 << 30) + 1)
    with pytest.raises(OptionError, match=r"^file: .*is not a regular file of at most 1 GiB"):
        load_problems(str(path), "kodcode")


def test_the_tasks_of_a_file_are_counted_and_divided_into_splits(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({**KODCODE, "question": f"Add, number {n}."}) for n in range(100)))
    tasks = CodeTasks(file=str(path))
    counts = [tasks.count(split) for split in tasks.splits]
    assert counts[-1] == sum(count or 0 for count in counts[:-1]) == 100  # the last split is any
    assert counts == [80, 11, 9, 100]
    texts = {CodeOptions(file=str(path), split="eval").problem(tasks.task("eval", n).seed).text for n in range(9)}
    assert len(texts) == 9
