"""Texts of issues, made from failing tests. There are three levels, from much help to little.

1. Each function with a bug, its file, and the error of a failing test.
2. The symptoms: code that shows them, made from tests, with the expected and the actual result.
3. The files whose tests fail.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAX_ERROR = 12
"""Maximum lines of an error."""
_MAX_TESTS = 10
"""Maximum number of tests that an issue names."""
_MAX_HELPER = 15
"""Maximum lines of a definition that an example repeats."""
_COMPARISON = re.compile(r"(?:AssertionError: )?(?:assert (?P<left>.+) (?:==|is) (?P<right>.+)|(?P<a>.+) != (?P<b>.+))")
_KIND = re.compile(r"(?:Lists|Tuples|Sequences) differ: ")
"""What unittest puts before two values."""
_OPAQUE = re.compile(r"\bself\.(?!assert|fail)")
"""Marks an example that depends on other code of its test case."""
_HINT = re.compile(r"\s*(?:Use -v|Omitting \d|\.\.\.Full output|Skipping \d)")


_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What a bug does.

    Attributes:
        function: Function with the bug.
        file: File of the function.
        tests: Ids of the tests that the bug makes fail; not empty.
        messages: Why some of them fail.
    """

    function: str
    file: str
    tests: Sequence[str]
    messages: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Example:
    """Code that shows a bug, with the expressions of its result and of the expected value, if known."""

    text: str
    sides: tuple[ast.expr, ast.expr] | None


def statements(repo: str, symptoms: Sequence[Symptom], tests: Sequence[str], tree: Path) -> tuple[str, str, str]:
    """Return the texts of the three levels about the package `repo`, whose source without a bug is in `tree`.

    `tests` fail with all bugs together, those of a symptom with its bug alone.
    """
    chosen: list[tuple[str, _Example | None]] = []
    for one in symptoms:
        chosen.append(_clearest(one, tree, [test for test, _ in chosen]))
    errors = [_error(one.messages, test) for one, (test, _) in zip(symptoms, chosen, strict=True)]
    first = [
        f"`{one.function}` in `{one.file}` does not work correctly. For example, the test `{test}` fails:\n\n"
        f"{_block(error)}"
        for one, (test, _), error in zip(symptoms, chosen, errors, strict=True)
    ]
    second = [
        _shown(example, error) if example else f"The test `{test}` fails:\n\n{_block(error)}"
        for (test, example), error in zip(chosen, errors, strict=True)
    ]
    bugs = len(second)
    lead = f"{repo} has a bug. An example:" if bugs == 1 else f"{repo} has {bugs} bugs. An example of each:"
    return "\n\n".join(first), "\n\n".join([lead, *second]), _failing(repo, tests)


def _failing(repo: str, tests: Sequence[str]) -> str:
    files = sorted({test.partition("::")[0] for test in tests})
    names = ", ".join(f"`{file}`" for file in files[:3]) + (" and other files" if len(files) > 3 else "")
    shown = [f"- `{test}`" for test in tests[:_MAX_TESTS]]
    more = [f"- and {len(tests) - _MAX_TESTS} more"] if len(tests) > _MAX_TESTS else []
    return "\n".join([f"These tests of {repo} in {names} fail. Find the cause and fix it.", "", *shown, *more])


def _shown(example: _Example, error: Sequence[str]) -> str:
    text = f"```python\n{example.text}\n```\n\n"
    line = _KIND.sub("", error[0]) if error else ""
    found = _COMPARISON.fullmatch(line) if example.sides else None
    actual, expected = (found["left"] or found["a"], found["right"] or found["b"]) if found else ("", "")
    is_clear = actual != expected and "..." not in line
    if not is_clear or sum(line.count(sign) for sign in (" == ", " is ", " != ")) != 1:
        return f"{text}It fails with:\n\n{_block(error)}"
    if example.sides and _is_literal(example.sides[0]) and not _is_literal(example.sides[1]):
        actual, expected = expected, actual
    return f"{text}Expected: `{expected}`\n\nActual: `{actual}`"


def _is_literal(node: ast.expr) -> bool:
    return not any(isinstance(one, (ast.Call, ast.Name)) for one in ast.walk(node))


def _clearest(symptom: Symptom, tree: Path, used: Sequence[str]) -> tuple[str, _Example | None]:
    """Return the test with the clearest and shortest example, and the example; the first test if none has an example.

    Tests in `used`, which illustrate other bugs, are chosen only if there are no others.
    """
    examples = [(test, _example(test, symptom.messages.get(test, ""), tree)) for test in symptom.tests]
    usable = [(test, example) for test, example in examples if example]
    return (
        min(usable, key=lambda one: (one[0] in used, bool(_OPAQUE.search(one[1].text)), len(one[1].text)))
        if usable
        else (symptom.tests[0], None)
    )


def _example(test: str, traceback: str, tree: Path) -> _Example | None:
    """Return the statements of a test up to the one that fails, with the definitions that they need; None if unknown.

    The traceback tells where the test is: its class may inherit it from another file.
    """
    case, _, parameters = test.rpartition("::")[2].partition("[")
    places = re.findall(rf"^(\S+\.py):(\d+): in {re.escape(case)}$", traceback, re.MULTILINE)
    if not places:
        return None
    file, line = places[-1][0], int(places[-1][1])
    try:
        source = (tree / file).read_text(encoding="utf-8")
        module = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    cases = [one for one in ast.walk(module) if isinstance(one, _Function) and one.name == case]
    found = next((one for one in cases if one.lineno <= line <= (one.end_lineno or 0)), None)
    if found is None:
        return None
    is_doc = ast.get_docstring(found) is not None and len(found.body) > 1
    body = [one for one in found.body[is_doc:] if one.lineno <= line]
    if not body:
        return None
    needed = {one.arg for one in found.args.args if one.arg != "self"} | _names(body)
    others = [one for one in module.body if one is not found]
    needed |= _names(
        [one for one in others if not isinstance(one, (ast.Import, ast.ImportFrom)) and _needed(one, needed, source)]
    )
    above = [text for one in others if (text := _needed(one, needed, source))]
    if "self" in needed:
        above.append("# self is the test case")
    if parameters:
        above.append(f"# parameters of the test: {parameters.removesuffix(']')}")
    code = _text(source, body[0], body[-1])
    return _Example("\n".join([*above, *([""] if above else []), code]), _sides(body[-1]))


def _needed(statement: ast.stmt, needed: set[str], source: str) -> str:
    """Return the part of a module's statement that defines what is needed; empty if none of it is."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        kept = [one for one in statement.names if (one.asname or one.name).partition(".")[0] in needed]
        if not kept or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            return ""
        if isinstance(statement, ast.Import):
            return ast.unparse(ast.Import(names=kept))
        return ast.unparse(ast.ImportFrom(module=statement.module, names=kept, level=statement.level))
    named = {getattr(statement, "name", "")}
    if isinstance(statement, ast.Assign):
        named = {one.id for one in statement.targets if isinstance(one, ast.Name)}
    text = "" if named.isdisjoint(needed) else _text(source, statement, statement)
    return text if text.count("\n") < _MAX_HELPER else ""


def _text(source: str, first: ast.stmt, last: ast.stmt) -> str:
    decorators = getattr(first, "decorator_list", [])
    start = min([first.lineno, *(one.lineno for one in decorators)])
    return textwrap.dedent("\n".join(source.split("\n")[start - 1 : last.end_lineno]))


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _sides(statement: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """Return the two values that a statement compares, with ``assert`` or with a method of unittest."""
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right])):
            return left, right
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="assertEqual"), args=[left, right, *_])):
            return left, right
    return None


def _error(messages: Mapping[str, str], test: str) -> list[str]:
    """Return the lines of the error of a test, without the traceback."""
    message = messages.get(test) or messages.get(test.partition("::")[0], "")
    lines = [line[4:] for line in message.split("\n") if line.startswith("E  ")]
    lines = [line for line in lines if line.strip() and not _HINT.match(line)] or message.strip().split("\n")[-1:]
    return lines[:_MAX_ERROR]


def _block(lines: Sequence[str]) -> str:
    return "\n".join(["```", *lines, "```"])
