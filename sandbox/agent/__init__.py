"""The program that runs inside a box: what starts commands, keeps shells and moves files there.

Its modules are written for Python 3.7 with nothing but the standard library, since the box's Python runs them, not
ours. They are sent to it when the box starts; nothing of envkit needs to be installed inside.

`command` is what to run in the box, and `opening` is what to write to its standard input first. From then on standard
input and standard output are the channel, in frames (`envkit.sandbox.agent.wire`).
"""

from __future__ import annotations

import importlib.util
import marshal
from pathlib import Path

_FOLDER = Path(__file__).parent
_NOT_SENT = ("__init__", "boot")

BOOT = (
    "import os\n"
    "def take(fd,n):\n"
    " b=b''\n"
    " while len(b)<n:\n"
    "  p=os.read(fd,n-len(b))\n"
    "  if not p:os._exit(0)\n"
    "  b+=p\n"
    " return b\n"
    "exec(compile(take(0,int(take(0,9))),'agent/boot.py','exec'))\n"
)
"""Reads, from standard input, nine digits and as many bytes as they say, and runs those."""


def command(python: str) -> list[str]:
    """Return the program and the arguments that start the agent by the box's `python`, 3.7 or newer."""
    return [python, "-I", "-S", "-E", "-c", BOOT]


def opening() -> bytes:
    """Return what the agent is sent before anything else: its first part and its modules, each after its length.

    A module is there twice, as source and compiled for the Python that runs us, which inside a bubblewrap box is the
    same; it saves that box several milliseconds.
    """
    magic = importlib.util.MAGIC_NUMBER.hex()
    parts = []
    for path in sorted(_FOLDER.glob("*.py")):
        if path.stem not in _NOT_SENT:
            text = path.read_bytes()
            code = marshal.dumps(compile(text, f"agent/{path.name}", "exec", dont_inherit=True))
            parts += [(path.stem, text), (f"{path.stem}@{magic}", code)]
    boot = (_FOLDER / "boot.py").read_bytes()
    modules = b"".join(b"%s %d\n%s" % (name.encode(), len(body), body) for name, body in parts)
    return b"%09d%s%09d%s" % (len(boot), boot, len(modules), modules)
