"""The program that runs inside a box: what starts commands, keeps shells and moves files there.

Its modules are written for Python 3.7 with nothing but the standard library, since the box's Python runs them, not
ours. They are sent to it when the box starts; nothing of envkit needs to be installed inside.

`command` is what to run in the box, and `opening` is what to write to its standard input first. From then on standard
input and standard output are the channel, in frames (`envkit.sandbox.agent.framing`).
"""

from __future__ import annotations

import importlib.util
import marshal
from pathlib import Path

_FOLDER = Path(__file__).parent
_NOT_SENT = ("__init__.py", "bootstrap.py")

BOOT = (
    "import marshal,posix\n"
    "from _frozen_importlib_external import MAGIC_NUMBER\n"
    "def take(fd,n):\n"
    " b=b''\n"
    " while len(b)<n:\n"
    "  p=posix.read(fd,n-len(b))\n"
    "  if not p:posix._exit(0)\n"
    "  b+=p\n"
    " return b\n"
    "magic,code,text=[take(0,int(take(0,9)))for _ in range(3)]\n"
    "exec(marshal.loads(code)if magic==MAGIC_NUMBER else compile(text,'agent/bootstrap.py','exec'))\n"
)
"""Reads, from standard input, three parts and runs the second, or the third where the first is not of this Python.

Each part comes after its length, in nine digits. The package `os` is left to what follows: it takes its time.
"""


def command(python: str) -> list[str]:
    """Return the program and the arguments that start the agent by the box's `python`, 3.7 or newer."""
    return [python, "-I", "-S", "-E", "-c", BOOT]


def opening() -> bytes:
    """Return what the agent is sent before anything else: its first part and its modules, each after its length.

    Everything is there twice, as source and compiled for the Python that runs us, which inside a bubblewrap box is the
    same; it saves that box several milliseconds.
    """
    magic = importlib.util.MAGIC_NUMBER
    modules = b""
    for path in sorted(_FOLDER.rglob("*.py")):
        if path.name not in _NOT_SENT:
            module = ".".join(path.relative_to(_FOLDER).with_suffix("").parts)
            for name, body in ((module, path.read_bytes()), (f"{module}@{magic.hex()}", _compiled(path))):
                modules += b"%s %d\n%s" % (name.encode(), len(body), body)
    boot = _FOLDER / "bootstrap.py"
    return b"".join(b"%09d%s" % (len(part), part) for part in (magic, _compiled(boot), boot.read_bytes(), modules))


def _compiled(path: Path) -> bytes:
    return marshal.dumps(compile(path.read_bytes(), f"agent/{path.relative_to(_FOLDER)}", "exec", dont_inherit=True))
