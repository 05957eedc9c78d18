"""The program that runs a submission in a sandbox, with the arguments of the hidden tests.

It is sent to the sandbox as text, and uses only the standard library. It knows no expected result, so whatever a
submission does to it, the submission cannot learn one.

Its argument is the path of a JSON file with ``nonce``, ``path``, ``entry`` and ``tests``. It writes
``NONCE [[RESULT], null, ...] NONCE`` to standard output, in the order of the tests, with null for a call that raised or
returned a value that JSON cannot represent, such as a tuple. A whole program (``entry`` is empty) gets its one argument
as standard input, and its result is its standard output, or null if its exit code is not 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from typing import Any


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123 - runs without envkit
        request = json.load(file)
    output = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # what the submission prints goes nowhere
        os.dup2(nothing, stream)
    write, dumps, leave = os.write, json.dumps, os._exit
    call = load(request["path"], request["entry"]) if request["entry"] else program(request["path"])
    results: list[str] = []
    for arguments in request["tests"]:
        try:
            result = call(*arguments)
            # Written at once, because a later call may change it.
            results.append(dumps([result], allow_nan=False) if is_plain(result) else "null")
        except BaseException:
            results.append("null")
    content = f"{request['nonce']} [{', '.join(results)}] {request['nonce']}".encode()
    while content:
        content = content[write(output, content) :]
    leave(0)


def load(path: str, entry: str) -> Any:
    """Import the submission, and return a function that calls its function or method `entry`."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    if "." in entry:
        exec("from typing import *", module.__dict__)  # LiveCodeBench's stubs rely on it
    with open(path, encoding="utf-8") as file:  # noqa: PTH123 - runs without envkit
        exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    owner, _, name = entry.rpartition(".")

    def call(*arguments: Any) -> Any:
        holder = getattr(module, owner)() if owner else module
        return getattr(holder, name)(*arguments)

    return call


def program(path: str) -> Any:
    """Return a function that runs the submission as a program, with the function's argument as standard input."""

    def call(given: str) -> str:
        command = [sys.executable, "-I", path]
        done = subprocess.run(command, input=given.encode(), stdout=subprocess.PIPE, check=True)
        return done.stdout.decode(errors="replace")

    return call


def is_plain(value: object) -> bool:
    """Return whether a value has one of JSON's types, or of their subclasses, such as Counter."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(one) for key, one in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


if __name__ == "__main__":
    main()
