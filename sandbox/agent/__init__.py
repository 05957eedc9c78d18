"""The agent: the program inside each sandbox that runs commands and shells, and transfers files to and from the host.

The sandbox's own Python runs the agent, so the agent's modules use only Python 3.8 and the standard library. The host
sends these modules when the sandbox starts, so envkit need not be installed in the sandbox.

To start the agent, run the argv from `command` in the sandbox and write the bytes from `opening` to the standard input
of that process. After that, its standard input and output carry frames (`envkit.sandbox.agent.framing`).
"""

from __future__ import annotations

import importlib.util
import marshal
from functools import cache
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
"""Program that reads three parts from standard input: a magic number (bytecode version), bytecode and source code.

It runs the bytecode if the magic number is that of this Python, otherwise it runs the source code. Each part is
preceded by its length in nine digits. The program does not import `os`, which is slow to load.
"""


def command(python: str) -> list[str]:
    """Return the argv that starts the agent; `python` is the path of a Python (3.8 or newer) inside the sandbox."""
    return [python, "-I", "-S", "-E", "-c", BOOT]


@cache
def opening() -> bytes:
    """Return the input of `BOOT`: the bootstrap, followed by all modules of the agent, which the bootstrap reads.

    Bootstrap and modules are included as source code and as bytecode of the host's Python. The bytecode starts several
    milliseconds faster, but only a sandbox with the same Python version can use it, such as a bubblewrap sandbox.
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
