"""Bugs: small edits of a source file at places that `ast` finds. All other bytes of the file stay as they are.

`suspicion.bugs` imports this module without envkit, so it uses only the standard library.

==================  ================================================================================================
operator            edit
==================  ================================================================================================
compare_flip        another comparison: ``<`` becomes ``<=`` or ``>``
arith_flip          another arithmetic or bit operator: ``+`` becomes ``-``
bool_flip           ``and`` becomes ``or``, and the reverse
not_removed         a condition without its ``not``
off_by_one          an integer that is larger or smaller by one
branch_removed      an ``if`` without ``else`` whose body does nothing
default_flip        the other default of a parameter whose default is True or False
args_swapped        the first two arguments of a call in the other order
kwarg_dropped       a call without its last keyword argument
return_none         a function that returns None
assign_removed      a missing assignment to an attribute or item, or a missing augmented assignment
break_continue      ``continue`` in the place of ``break``
ifexp_swapped       the two values of a conditional expression in the other order
slice_shift         the end of a slice, moved by one
body_removed        a function whose body only raises NotImplementedError
==================  ================================================================================================
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_COMPARE: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: (r"not\s+in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: (r"is\s+not", ("is",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
}
_MAX_INTEGER = 1000
_MAX_BRANCH = 4
_REMOVED_BODY = (3, 30)
"""Smallest and largest number of statements of a body that is removed."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Found = tuple[str, int, int, str]
"""Operator, start and end in bytes, and the new text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A bug in a file.

    Attributes:
        operator: Kind of the bug.
        function: Qualified name of the function with the bug.
        line: Line that must run for the bug to have an effect, from 1.
        start: Offset in bytes of the text to replace.
        end: Offset of its end.
        text: The new text.
        weight: How many places of the source the edit changes: 1, or the number of statements of a removed body.
    """

    operator: str
    function: str
    line: int
    start: int
    end: int
    text: str
    weight: int = 1


def edits_of(source: bytes) -> list[Edit]:
    """Return the edits of all functions of a file, in the order of the file; none if it is not valid or not in UTF-8.

    Some edits give the same program, or one that is not valid: see `apply`.
    """
    try:
        source.decode()
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return sorted(_walk(tree, _Positions(source), "", inside=False), key=lambda one: (one.start, one.end, one.text))


def apply(source: bytes, edits: Sequence[Edit]) -> bytes | None:
    """Apply edits that do not overlap to a file; None if the result is not valid, or has the same syntax tree."""
    changed = source
    for edit in sorted(edits, key=lambda one: one.start, reverse=True):
        changed = changed[: edit.start] + edit.text.encode() + changed[edit.end :]
    try:
        return None if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)) else changed
    except (SyntaxError, ValueError):
        return None


class _Positions:
    """Offsets of nodes in a file, in bytes."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self.start(node), self.end(node)

    def text(self, start: int, end: int) -> str:
        return self._source[start:end].decode()

    def between(self, left: ast.expr, right: ast.expr, pattern: str) -> tuple[int, int] | None:
        """Return the span of an operator between two operands."""
        low = self.end(left)
        found = re.search(pattern.encode(), self._source[low : self.start(right)])
        return (low + found.start(), low + found.end()) if found else None

    def swapped(self, first: ast.expr, second: ast.expr) -> tuple[int, int, str]:
        """Return the edit that swaps two expressions."""
        spans = (self.start(second), self.end(second)), (self.end(first), self.start(second)), self.span(first)
        return self.start(first), self.end(second), "".join(self.text(*span) for span in spans)


def _walk(node: ast.AST, at: _Positions, name: str, *, inside: bool) -> Iterator[Edit]:
    """Yield the edits below a node. `name` is the qualified name of what encloses it; `inside`: a function does."""
    if isinstance(node, ast.JoinedStr):  # before Python 3.12, the positions in f-strings are wrong
        return
    if isinstance(node, _Function):
        name, inside = f"{name}.{node.name}".lstrip("."), True
        yield from _of_function(node, at, name)
        children: Sequence[ast.AST] = node.body
    elif isinstance(node, ast.ClassDef):
        name, children = f"{name}.{node.name}".lstrip("."), node.body
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value else []
    else:
        children = list(ast.iter_child_nodes(node))
    if inside and isinstance(node, (ast.expr, ast.stmt)):
        for operator, start, end, text in (*_of_expression(node, at), *_of_statement(node, at)):
            line = node.body[0].lineno if isinstance(node, ast.If) else node.lineno
            yield Edit(operator=operator, function=name, line=line, start=start, end=end, text=text)
    for child in children:
        yield from _walk(child, at, name, inside=inside)


def _of_function(node: _Function, at: _Positions, name: str) -> Iterator[Edit]:
    body = node.body if ast.get_docstring(node) is None else node.body[1:]
    if not body:
        return
    line = body[0].lineno
    for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
        if isinstance(default, ast.Constant) and isinstance(default.value, bool):
            start, end = at.span(default)
            text = str(not default.value)
            yield Edit(operator="default_flip", function=name, line=line, start=start, end=end, text=text)
    weight = sum(isinstance(one, ast.stmt) for statement in body for one in ast.walk(statement))
    if _REMOVED_BODY[0] <= weight <= _REMOVED_BODY[1]:
        start, end, text = at.start(body[0]), at.end(body[-1]), "raise NotImplementedError"
        yield Edit(operator="body_removed", function=name, line=line, start=start, end=end, text=text, weight=weight)


def _of_expression(node: ast.AST, at: _Positions) -> Iterator[_Found]:
    match node:
        case ast.Compare(left=left, ops=[kind], comparators=[right]) if type(kind) in _COMPARE:
            pattern, others = _COMPARE[type(kind)]
            if span := at.between(left, right, pattern):
                yield from (("compare_flip", *span, other) for other in others)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _ARITHMETIC and not _is_text(left):
            pattern, other = _ARITHMETIC[type(kind)]
            if span := at.between(left, right, pattern):
                yield ("arith_flip", *span, other)
        case ast.BoolOp(op=kind, values=[left, right, *_]):
            old, new = ("and", "or") if isinstance(kind, ast.And) else ("or", "and")
            if span := at.between(left, right, rf"\b{old}\b"):
                yield ("bool_flip", *span, new)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            start = at.start(node)
            lead = re.match(r"not\s*", at.text(start, at.start(operand)))
            if lead:
                yield ("not_removed", start, start + lead.end(), "")
        case ast.Constant(value=int() as value) if type(value) is int and value < _MAX_INTEGER:
            if at.text(*at.span(node)) == str(value):
                yield ("off_by_one", *at.span(node), str(value + 1))
                if value > 0:
                    yield ("off_by_one", *at.span(node), str(value - 1))
        case ast.IfExp(body=body, orelse=other):
            yield ("ifexp_swapped", *at.swapped(body, other))
        case ast.Slice(lower=None, upper=ast.expr() as upper):
            yield ("slice_shift", *at.span(upper), f"{at.text(*at.span(upper))} - 1")
        case ast.Call(args=arguments, keywords=keywords):
            match arguments:
                case [first, second, *_] if not any(isinstance(one, ast.Starred) for one in (first, second)):
                    yield ("args_swapped", *at.swapped(first, second))
            if keywords and keywords[-1].arg and len(arguments) + len(keywords) > 1:
                ends = [*map(at.end, arguments), *map(at.end, keywords[:-1])]
                yield ("kwarg_dropped", max(ends), at.end(keywords[-1]), "")


def _of_statement(node: ast.AST, at: _Positions) -> Iterator[_Found]:
    match node:
        case ast.If(body=body, orelse=[]) if len(body) <= _MAX_BRANCH:
            yield ("branch_removed", at.start(body[0]), at.end(body[-1]), "pass")
        case ast.Return(value=ast.expr()):
            yield ("return_none", *at.span(node), "return None")
        case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield ("assign_removed", *at.span(node), "pass")
        case ast.Break():
            yield ("break_continue", *at.span(node), "continue")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
