"""Texts of issues, made from a failing test: from much help to little.

1. The function, the file and the error of a failing test.
2. The symptom: a program that shows the bug, made from a test, with the expected and the actual result.
3. The files whose tests fail.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from .runs import TestRun

_MAX_ERROR = 12
"""Maximum lines of an error."""
_MAX_TESTS = 10
"""Maximum number of tests that an issue names."""
_UNITTEST = re.compile(r"(?:AssertionError: )?(?P<found>.+) != (?P<expected>.+)")


def statements(
    repo: str, places: Sequence[tuple[str, str]], tests: Sequence[str], run: TestRun, tree: Path
) -> tuple[str, str, str]:
    """Return the texts of the three levels.

    Args:
        repo: Name of the package.
        places: Pairs of the function and the file with a bug.
        tests: Ids of the tests that the bug makes fail.
        run: A run of the tests with the bug.
        tree: Folder of the package.
    """
    test, example = _clearest(tests, run.messages, tree)
    error = _error(run.messages, test)
    where = " and ".join(f"`{function}` in `{file}`" for function, file in places)
    verb = "do" if len(places) > 1 else "does"
    first = f"{where} {verb} not work correctly. For example, the test `{test}` fails:\n\n{_block(error)}"
    return first, _symptom(repo, example, error) or first, _failing(repo, tests)


def _failing(repo: str, tests: Sequence[str]) -> str:
    files = sorted({test.partition("::")[0] for test in tests})
    names = " and ".join(f"`{file}`" for file in files[:3]) + (" and other files" if len(files) > 3 else "")
    shown = [f"- `{test}`" for test in tests[:_MAX_TESTS]]
    more = [f"- and {len(tests) - _MAX_TESTS} more"] if len(tests) > _MAX_TESTS else []
    return "\n".join([f"Tests of {repo} in {names} fail. Find the bug and fix it.", "", *shown, *more])


def _symptom(repo: str, example: str, error: Sequence[str]) -> str:
    if not example:
        return ""
    text = f"This code does not work correctly with {repo}:\n\n```python\n{example}\n```\n\n"
    if values := _values(error):
        found, expected = values
        return f"{text}Expected: `{expected}`\n\nActual: `{found}`"
    return f"{text}It fails with:\n\n{_block(error)}"


def _values(error: Sequence[str]) -> tuple[str, str] | None:
    """Return the actual and the expected value of a comparison, if the error is nothing else and both are short."""
    line = error[0].removeprefix("AssertionError: ") if error else ""
    if line.startswith("assert "):
        try:
            node = ast.parse(line, mode="exec").body[0]
        except (SyntaxError, ValueError):
            return None
        match node:
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right])):
                return ast.unparse(left), ast.unparse(right)
        return None
    found = _UNITTEST.fullmatch(line)
    return (found["found"], found["expected"]) if found and line.count(" != ") == 1 else None


def _clearest(tests: Sequence[str], messages: Mapping[str, str], tree: Path) -> tuple[str, str]:
    """Return the test whose example is the shortest, and the example; the first test if none has one."""
    examples = [(test, _example(test, messages.get(test, ""), tree)) for test in tests]
    usable = [one for one in examples if one[1]]
    return min(usable, key=lambda one: len(one[1])) if usable else (tests[0], "")


def _example(test: str, message: str, tree: Path) -> str:
    """Return the statements of a test up to the one that fails, with the imports of its file; empty if unknown."""
    file, *names = test.split("::")
    case = names[-1].partition("[")[0]
    try:
        source = (tree / file).read_text(encoding="utf-8")
        module = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return ""
    nodes: list[ast.stmt] = module.body
    found: ast.stmt | None = None
    for name in (*names[:-1], case):
        found = next((one for one in nodes if getattr(one, "name", "") == name), None)
        if found is None:
            return ""
        nodes = getattr(found, "body", [])
    if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    lines = [int(number) for number in re.findall(rf"^{re.escape(file)}:(\d+): in {case}$", message, re.MULTILINE)]
    if not lines:
        return ""
    body = [one for one in found.body if one.lineno <= lines[-1]]
    if not body:
        return ""
    rows = source.split("\n")
    last = min(body[-1].end_lineno or lines[-1], len(rows))
    text = textwrap.dedent("\n".join(rows[body[0].lineno - 1 : last]))
    needed = {node.id for one in body for node in ast.walk(one) if isinstance(node, ast.Name)}
    known = [ast.unparse(part) for one in module.body for part in _imports(one, needed)]
    given = [f"# with {names[-1].removeprefix(case)}" if names[-1] != case else ""]
    return "\n".join(filter(None, ["\n".join([*known, ""]) if known else "", *given, text]))


def _imports(statement: ast.stmt, needed: set[str]) -> list[ast.stmt]:
    """Return an import without the names that are not needed."""
    if not isinstance(statement, (ast.Import, ast.ImportFrom)):
        return []
    kept = [one for one in statement.names if (one.asname or one.name).partition(".")[0] in needed or one.name == "*"]
    if isinstance(statement, ast.Import):
        return [ast.Import(names=kept)] if kept else []
    return [ast.ImportFrom(module=statement.module, names=kept, level=statement.level)] if kept else []


def _error(messages: Mapping[str, str], test: str) -> list[str]:
    """Return the lines of the error of a test, without the traceback."""
    message = messages.get(test) or messages.get(test.partition("::")[0], "")
    lines = [line[1:].strip() if line[4:] == "" else line[4:] for line in message.split("\n") if line.startswith("E  ")]
    lines = [line for line in lines if line.strip()] or message.strip().split("\n")[-1:]
    return lines[:_MAX_ERROR]


def _block(lines: Sequence[str]) -> str:
    return "\n".join(["```", *lines, "```"])
