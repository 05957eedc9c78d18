"""The program that runs a submission's function in a sandbox, with the hidden tests' arguments.

It is sent to the sandbox as text. It knows no expected result, so whatever a submission does to it, the submission
cannot learn one. Standard input: a JSON object with ``nonce``, ``path``, ``entry`` and ``tests``. Standard output:
``NONCE [[RESULT], null, ...] NONCE``, with null for a call that raised or returned a value that JSON cannot represent.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    output = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # what the submission prints goes nowhere
        os.dup2(nothing, stream)
    write, dumps, leave = os.write, json.dumps, os._exit
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    if "." in request["entry"]:
        exec("from typing import *", module.__dict__)  # LiveCodeBench's stubs rely on it
    with open(request["path"], encoding="utf-8") as file:  # noqa: PTH123 - runs without envkit
        exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    results: list[str] = []
    for arguments in request["tests"]:
        try:
            function: Any = module
            for name in request["entry"].split("."):
                function = getattr(function, name)
                if isinstance(function, type):
                    function = function()
            result = function(*arguments)
            results.append(dumps([result], allow_nan=False) if is_plain(result) else "null")
        except BaseException:
            results.append("null")
    content = f"{request['nonce']} [{', '.join(results)}] {request['nonce']}".encode()
    while content:
        content = content[write(output, content) :]
    leave(0)


def is_plain(value: object) -> bool:
    """Return whether a value has one of JSON's types, and no subclass of them."""
    kind = type(value)
    if kind is list:
        return all(map(is_plain, value))  # type: ignore[call-overload]
    if kind is dict:
        return all(type(key) is str and is_plain(one) for key, one in value.items())  # type: ignore[attr-defined]
    return value is None or kind in (bool, int, float, str)


if __name__ == "__main__":
    main()
