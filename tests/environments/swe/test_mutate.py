"""The operators: each makes the expected edit, keeps all other bytes, and gives a valid program."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from envkit.environments.swe.build import in_random_order
from envkit.environments.swe.mutate import Edit, apply, edits_of

CASES = {
    "compare_flip": ("if a  <  b: # é\n        return a\n", "if a  <=  b: # é\n        return a\n"),
    "arith_flip": ("return (a) + b  # sum\n", "return (a) - b  # sum\n"),
    "bool_flip": ("return a and b or 1\n", "return a or b or 1\n"),
    "not_removed": ("return not  a\n", "return a\n"),
    "off_by_one": ("return a[7]\n", "return a[8]\n"),
    "branch_removed": ("if a:\n        b = 1\n        b += 1\n    return b\n", "if a:\n        pass\n    return b\n"),
    "args_swapped": ("return max(a,  b , 'ü')\n", "return max(b,  a , 'ü')\n"),
    "kwarg_dropped": ("return dict(a=a,\n        b=b)\n", "return dict(a=a)\n"),
    "return_none": ("return a\n", "return None\n"),
    "assign_removed": ("a.b = 1\n    return a\n", "pass\n    return a\n"),
    "break_continue": ("for _ in a:\n        break\n", "for _ in a:\n        continue\n"),
    "ifexp_swapped": ("return a if b else c\n", "return c if b else a\n"),
    "slice_shift": ("return a[:b]\n", "return a[:b - 1]\n"),
    "body_removed": ('"""Ü."""\n    a = 1\n    b = 2\n    return a\n', '"""Ü."""\n    raise NotImplementedError\n'),
}
HEAD, TAIL = "# ä\nclass K:\n  x = 3 < 4\n\n\ndef f(a, b, c):\n    ", "\n\ny = 1 + 2\n"


@pytest.mark.parametrize("operator", CASES)
def test_an_operator_edits_its_place_and_keeps_all_other_bytes(operator: str) -> None:
    before, after = ((HEAD + text + TAIL).encode() for text in CASES[operator])
    edits = [one for one in edits_of(before) if one.operator == operator]
    assert after in [apply(before, [one]) for one in edits]


def test_a_default_is_flipped_if_the_body_runs() -> None:
    source = b"def f(a, *, b=False):\n    '''Doc.'''\n    return a\n"
    (edit,) = [one for one in edits_of(source) if one.operator == "default_flip"]
    assert apply(source, [edit]) == source.replace(b"False", b"True")
    assert edit.line == 3


def test_code_outside_of_functions_annotations_and_f_strings_have_no_edits() -> None:
    assert edits_of(b"x = 1 < 2\nclass K:\n    y = 1 + 2\ndef f(a: int | 3 = 4):\n    f'{a + 1}'\n") == []


@pytest.mark.parametrize("source", [b"def f(:\n", b"def f():\n    return '\xff'\n", b"\x00"])
def test_a_file_that_is_no_program_in_utf_8_has_no_edits(source: bytes) -> None:
    assert edits_of(source) == []


def test_an_edit_that_changes_nothing_or_is_no_program_is_refused() -> None:
    source = b"def f(a):\n    return max(a, a)\n"
    (swapped,) = [one for one in edits_of(source) if one.operator == "args_swapped"]
    assert apply(source, [swapped]) is None
    wrong = Edit(operator="x", function="f", line=2, start=14, end=20, text="(")
    assert apply(source, [wrong]) is None


def test_edits_of_real_modules_are_programs_that_differ() -> None:
    source = Path(ast.__file__).read_bytes()
    for edit in edits_of(source)[::200]:
        changed = apply(source, [edit])
        if changed is not None:
            assert changed[: edit.start] == source[: edit.start]
            assert changed[edit.start + len(edit.text.encode()) :] == source[edit.end :]


def test_the_order_depends_on_the_seed_alone_and_takes_the_operators_in_turn() -> None:
    source = ("def f(a, b):\n" + "    a = a + 1 if not a else a < b\n" * 5 + "    return a\n").encode()
    edits = [("a.py", one) for one in edits_of(source)]
    ordered = in_random_order(edits, 3)
    assert ordered == in_random_order(list(reversed(edits)), 3)
    assert ordered != in_random_order(edits, 4)
    kinds = {one.operator for _, one in edits}
    assert {one.operator for _, one in ordered[: len(kinds)]} == kinds


def test_several_edits_are_applied_at_once() -> None:
    source = b"def f(a):\n    return a + 1\n\ndef g(a):\n    return a * 2\n"
    edits = [one for one in edits_of(source) if one.operator == "arith_flip"]
    assert apply(source, edits) == source.replace(b"a + 1", b"a - 1").replace(b"a * 2", b"a + 2")
