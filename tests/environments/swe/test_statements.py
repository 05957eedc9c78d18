"""The texts of issues at three levels."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.environments.swe.statements import Symptom, statements

TESTS = """from math import floor, sqrt

import pytest

LIMIT = 3
OTHER = 4


@pytest.fixture
def numbers():
    return [1, 2]


def test_total(numbers):
    assert total(numbers) == LIMIT


@pytest.mark.parametrize("n", [4])
def test_root(n):
    found = sqrt(n)
    assert 2 == found
    assert floor(n)


class TestMore:
    def test_error(self):
        total(None)
"""
MESSAGES = {
    "t.py::test_total": "t.py:15: in test_total\n    assert x\nE   assert 4 == 3\nE    +  where 4",
    "t.py::test_root[4]": "t.py:21: in test_root\n    assert x\nE   assert 2 == 3.0\nE   Use -v to get more diff",
    "t.py::TestMore::test_error": "t.py:27: in test_error\n    x\na.py:3: in total\nE   TypeError: no numbers",
}


def texts(tmp_path: Path, *groups: list[str]) -> tuple[str, str, str]:
    (tmp_path / "t.py").write_text(TESTS)
    symptoms = [Symptom(function="total", file="a.py", tests=tests, messages=MESSAGES) for tests in groups]
    return statements("sums-1.0", symptoms, [test for tests in groups for test in tests], tmp_path)


def test_level_1_names_the_function_the_file_and_the_error(tmp_path: Path) -> None:
    assert texts(tmp_path, ["t.py::test_total"])[0] == (
        "`total` in `a.py` does not work correctly. For example, the test `t.py::test_total` fails:\n\n"
        "```\nassert 4 == 3\n +  where 4\n```"
    )


def test_level_2_is_code_with_all_that_it_needs_and_both_values(tmp_path: Path) -> None:
    assert texts(tmp_path, ["t.py::test_total"])[1] == (
        "sums-1.0 has a bug. An example:\n\n```python\nimport pytest\nLIMIT = 3\n@pytest.fixture\ndef numbers():\n"
        "    return [1, 2]\n\nassert total(numbers) == LIMIT\n```\n\nExpected: `3`\n\nActual: `4`"
    )


def test_an_error_is_shown_without_the_traceback(tmp_path: Path) -> None:
    text = texts(tmp_path, ["t.py::TestMore::test_error"])[1]
    assert text.endswith("total(None)\n```\n\nIt fails with:\n\n```\nTypeError: no numbers\n```")
    assert "a.py" not in text


def test_every_bug_of_a_task_gets_its_own_example(tmp_path: Path) -> None:
    both = ["t.py::test_total", "t.py::TestMore::test_error"]
    first, second, _ = texts(tmp_path, both, both)
    assert second.startswith("sums-1.0 has 2 bugs. An example of each:")
    assert first.count("does not work correctly") == 2
    assert ("assert total(numbers)" in second, "total(None)" in second) == (True, True)


def test_level_3_names_only_tests(tmp_path: Path) -> None:
    assert texts(tmp_path, ["t.py::test_total"])[2] == (
        "These tests of sums-1.0 in `t.py` fail. Find the cause and fix it.\n\n- `t.py::test_total`"
    )


@pytest.mark.parametrize("test", ["t.py", "missing.py::test_a", "t.py::test_missing"])
def test_level_2_does_not_name_the_function_if_there_is_no_example(test: str, tmp_path: Path) -> None:
    assert texts(tmp_path, [test])[1].startswith(f"sums-1.0 has a bug. An example:\n\nThe test `{test}` fails:")


def test_an_inherited_test_is_found_where_the_traceback_says(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text("class Base:\n    def test_x(self):\n        self.assertEqual([1], total([]))\n")
    error = "base.py:3: in test_x\n    x\nE   AssertionError: Lists differ: [1] != []\nE   \nE   more"
    symptom = Symptom(function="f", file="a.py", tests=["t.py::T::test_x"], messages={"t.py::T::test_x": error})
    text = statements("sums-1.0", [symptom], ["t.py::T::test_x"], tmp_path)[1]
    assert "# self is the test case\n\nself.assertEqual([1], total([]))" in text
    assert text.endswith("Expected: `[1]`\n\nActual: `[]`")
