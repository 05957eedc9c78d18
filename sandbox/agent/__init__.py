"""The agent: the program that runs commands and shells inside a sandbox and transfers its files.

The sandbox's own Python runs the agent, so its modules use only Python 3.7 and the standard library. The host sends
the modules when the sandbox starts; envkit need not be installed in the sandbox.

To start the agent, run the argv from `command` in the sandbox and write the bytes from `opening` to its standard input.
After that, standard input and standard output carry frames (`envkit.sandbox.agent.framing`).
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
"""Program that reads a bytecode version (magic number), bytecode and source from standard input and runs one of them.

It runs the bytecode if this Python has the same version, otherwise the source. Each part is preceded by its length in
nine digits. The program does not import `os`, which is slow to load.
"""


def command(python: str) -> list[str]:
    """Return the argv that starts the agent; `python` is the path of Python 3.7 or newer inside the sandbox."""
    return [python, "-I", "-S", "-E", "-c", BOOT]


def opening() -> bytes:
    """Return the bytes to send to `BOOT`: the bootstrap and all modules, each preceded by its length.

    The bytes contain source and bytecode. A bubblewrap sandbox runs the host's Python, so it can use the bytecode.
    Bytecode makes the start several milliseconds faster.
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
