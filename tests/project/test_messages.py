"""The product decides by kinds, codes and classes, never by the text of its own messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for part in ("envkit", "sandbox", "environments", "trainer_bridge") for path in ROOT.glob(f"{part}/**/*.py")
]

_NAMES = frozenset({"cause", "reason", "why", "message", "detail", "explanation", "strerror", "last_line"})
"""Variables and attributes that hold a message."""
_TESTS = frozenset({"startswith", "endswith", "find", "rfind", "index", "count", "partition", "rpartition"})
_CUTS = frozenset({"removeprefix", "removesuffix"})
_REGEX = frozenset({"match", "fullmatch", "search", "findall", "finditer", "sub", "split"})
_WORDING = 'where = "" if path is None or str(path) in error.text'
"""The one permitted line: it keeps a path from being printed twice."""
_LIBRARY = re.compile(r"# library's message: \w+")
"""Marks a line that matches the message of a library or the kernel; it names that."""


class _Function(ast.NodeVisitor):
    """Finds in one module the decisions by the text of a message."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[ast.expr] = []
        self._errors = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
        self._errors |= {"error"}
        self._tainted: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.NamedExpr)) and self._is_from_error(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self._tainted |= {one.id for each in targets for one in ast.walk(each) if isinstance(one, ast.Name)}
        self._tainted -= {"_"}
        self.visit(tree)

    def _is_from_error(self, node: ast.expr) -> bool:
        """Whether it is the text of an error, or a part of that."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
            return any(isinstance(one, ast.Name) and one.id in self._errors for one in node.args)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._is_from_error(node.func.value)
        return isinstance(node, ast.Subscript) and self._is_from_error(node.value)

    def _is_message(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in _NAMES or node.id in self._tainted
        if isinstance(node, ast.Attribute):
            is_of_error = isinstance(node.value, ast.Name) and node.value.id in self._errors
            return node.attr in _NAMES or (is_of_error and node.attr in ("text", "args", "msg"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
            return self._is_from_error(node) or any(self._is_message(one) for one in node.args)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # such as .lower()
            return self._is_message(node.func.value) and node.func.attr not in _CUTS
        return False

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
            if isinstance(op, (ast.In, ast.NotIn)):
                is_text = self._is_message(right) or (self._is_message(left) and not isinstance(right, ast.Name))
            else:
                is_text = any(self._is_message(a) and _is_words(b) for a, b in ((left, right), (right, left)))
            if is_text:
                self.found.append(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            is_test = node.func.attr in _TESTS and self._is_message(node.func.value)
            is_regex = node.func.attr in _REGEX and any(self._is_message(one) for one in node.args)
            if is_test or is_regex:
                self.found.append(node)
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        if self._is_message(node.subject):
            self.found.append(node.subject)
        self.generic_visit(node)


def _is_words(node: ast.expr) -> bool:
    """Return whether it is a text that is not empty; any code may check for an empty message."""
    return (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != "") or isinstance(
        node, ast.JoinedStr
    )


def decisions(source: str) -> Iterator[str]:
    """Yield the lines of `source` that decide by the text of a message and carry no mark."""
    lines = source.splitlines()
    for node in _Function(ast.parse(source)).found:
        span = lines[node.lineno - 1 : node.end_lineno]
        if not any(_LIBRARY.search(line) or _WORDING in line for line in span):
            yield f"{node.lineno}: {lines[node.lineno - 1].strip()}"


def test_no_line_decides_by_the_text_of_our_own_messages() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in decisions(path.read_text())]
    assert found == []
