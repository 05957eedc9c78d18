"""Problems from files: rows of KodCode and of LiveCodeBench, one JSON object per line.

    kodcode        ``question``, ``solution``, and ``test``: ``from solution import f`` and asserts. A row is used if
                   every assert is ``assert f(literals) == literal`` with literals that JSON can represent.
    livecodebench  ``question_content``, ``starter_code``, ``metadata``, and the tests ``public_test_cases`` and
                   ``private_test_cases``, which give standard input and output, or arguments and result of a method.

Rows that cannot be used are skipped, and counted by reason. The file, of at most 1 GiB, is held in memory. Results of
functions are compared by ``==``. A tuple is no list, and rows with tuples are skipped.
"""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import logging
import pickle
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from envkit.errors import OptionError
from envkit.types import JSON

from .driver import is_plain
from .tasks import Case, Problem, size

_MAX_TESTS_BYTES = 256 << 20
"""Maximum size of a row's private tests, after decompression."""

_MAX_EXPECTED_BYTES = 16 << 20
"""Maximum size of a row's expected results, as JSON."""

_MAX_FILE_BYTES = 1 << 30

_log = logging.getLogger(__name__)


class SkippedRowError(Exception):
    """A row that cannot be used; the message is the reason, the same for all rows of the kind."""


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """The problems of a file, the number of skipped rows by reason, and a line about them, if there are any."""

    problems: Sequence[Problem]
    skipped: Mapping[str, int]
    notes: Sequence[str]


@lru_cache(maxsize=4)
def load_problems(path: str, format: str) -> LoadedFile:
    """Return the problems of the file `path`, whose rows have the format ``"kodcode"`` or ``"livecodebench"``.

    Raises:
        OptionError: The file cannot be read, a line is not a JSON object, or no row can be used.
    """
    problems: list[Problem] = []
    skipped: Counter[str] = Counter()
    try:
        rows = [json.loads(line) for line in _text(path).split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError("file", f"{path}: {error}; must have one JSON object per line") from None
    for row in rows:
        try:
            problem = FORMATS[format](row)
            if sum(size(test.expected) for test in problem.tests) > _MAX_EXPECTED_BYTES:
                raise SkippedRowError(f"the expected results exceed {_MAX_EXPECTED_BYTES >> 20} MiB")
            problems.append(problem)
        except SkippedRowError as reason:
            skipped[str(reason)] += 1
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            skipped[f"not a row of {format} ({type(error).__name__}: {error})"] += 1
    reasons = "; ".join(f"{reason}: {count}" for reason, count in skipped.items())
    if not problems:
        raise OptionError("file", f"{path} has no row of {format} that can be used ({reasons or 'it is empty'})")
    notes = [f"{path}: skipped {skipped.total()} of {len(rows)} rows ({reasons})"] if skipped else []
    for line in notes:
        _log.warning(line)
    return LoadedFile(problems, skipped, notes)


def _text(path: str) -> str:
    """Return the content of a regular file. Opening a device or named pipe could wait, or never end."""
    file = Path(path).expanduser()
    found = file.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
        raise ValueError(f"it is not a regular file of at most {_MAX_FILE_BYTES >> 30} GiB")
    return file.read_text(encoding="utf-8")


def kodcode(row: Mapping[str, Any]) -> Problem:
    """Return the problem of a row of KodCode.

    Raises:
        SkippedRowError: The tests have another form.
    """
    try:
        tree = ast.parse(row["test"])
    except SyntaxError:
        raise SkippedRowError("the test is not valid Python") from None
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "solution")
    names = [alias.name for node in imports for alias in node.names]
    if len(names) != 1:
        raise SkippedRowError("the test does not import exactly one name from solution")
    tests = [_case(node.test, names[0]) for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if not tests:
        raise SkippedRowError("no asserts")
    text = f"{row['question'].strip()}\n\nThe name of the function is `{names[0]}`."
    stub = f"def {names[0]}(*args):\n    raise NotImplementedError\n"
    return Problem(text, names[0], (), tests, stub, row["solution"])


def _case(test: ast.expr, name: str) -> Case:
    match test:
        case ast.Compare(
            left=ast.Call(func=ast.Name(id=called), args=arguments, keywords=[]),
            ops=[ast.Eq()],
            comparators=[expected],
        ) if called == name:
            return Case(tuple(_literal(one) for one in arguments), _literal(expected))
    raise SkippedRowError("an assert does not have the form f(literals) == literal")


def _literal(node: ast.expr) -> JSON:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        raise SkippedRowError("an assert does not have the form f(literals) == literal") from None
    if not is_plain(value):
        raise SkippedRowError("a literal is not JSON, such as a tuple or set")
    found: JSON = value
    return found


def livecodebench(row: Mapping[str, Any]) -> Problem:
    """Return the problem of a row of LiveCodeBench.

    Raises:
        SkippedRowError: The tests have no form that is known.
    """
    examples, hidden = json.loads(row["public_test_cases"]), _private_tests(row["private_test_cases"])
    kinds = {one["testtype"] for one in [*examples, *hidden]}
    if len(kinds) != 1 or not kinds <= {"stdin", "functional"}:
        raise SkippedRowError("the tests are not all of the type stdin, or all functional")
    if kinds == {"stdin"}:
        entry = ""
        read = _program_case
    else:
        entry = f"Solution.{json.loads(row['metadata'])['func_name']}"
        read = _method_case
    shown, tests = [read(one) for one in examples], [read(one) for one in [*examples, *hidden]]
    stub = row.get("starter_code") or "import sys\n"
    return Problem(row["question_content"].strip(), entry, shown, tests, stub, None)


def _program_case(test: Mapping[str, str]) -> Case:
    return Case((test["input"],), test["output"])


def _method_case(test: Mapping[str, str]) -> Case:
    return Case(tuple(json.loads(line) for line in test["input"].split("\n") if line), json.loads(test["output"]))


def _private_tests(text: str) -> list[dict[str, str]]:
    """Read private tests: a JSON list, or a pickled string of JSON, compressed with zlib, in base64."""
    try:
        plain: Any = json.loads(text)
    except ValueError:
        try:
            unpacker = zlib.decompressobj()
            pickled = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_TESTS_BYTES)
            if unpacker.unconsumed_tail:
                raise SkippedRowError(f"the private tests are larger than {_MAX_TESTS_BYTES >> 20} MiB")
            plain = json.loads(_TextUnpickler(io.BytesIO(pickled)).load())
        except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, TypeError, ValueError):
            raise SkippedRowError("the private tests are neither JSON nor a pickled string") from None
    found: list[dict[str, str]] = plain
    return found


class _TextUnpickler(pickle.Unpickler):
    """Reads pickles of plain values. It imports nothing, so that it runs no code of the pickle."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Problem]] = {"kodcode": kodcode, "livecodebench": livecodebench}
"""Reads a row, by the name of its format."""
