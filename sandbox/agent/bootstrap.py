"""The bootstrap of the agent: sends the hello frame as soon as possible, then receives the other modules and runs them.

`envkit.sandbox.agent.BOOT` runs this file as a script, and defines ``take(fd, count)``, which reads `count` bytes. The
bootstrap does not import ``os`` and ``__future__``, because they are slow to load. Without ``__future__``, annotations
that Python 3.8 cannot evaluate must be strings.
"""

import marshal
import posix
import sys

# Do not import ModuleSpec from importlib.machinery, which is slow to load.
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    def take(fd: int, count: int) -> bytes: ...


class Finder:
    """Import hook that makes the received modules importable as ``agent.NAME`` and ``agent.PACKAGE.NAME``.

    Args:
        content: Each module twice: a line ``NAME SIZE`` and SIZE bytes of source code, then a line ``NAME@MAGIC SIZE``
            and SIZE bytes of bytecode. MAGIC is the magic number (in hex) of the Python that can load the bytecode.
    """

    def __init__(self, content: bytes) -> None:
        self._parts = {}
        self._packages = {""}
        at = 0
        while at < len(content):
            end = content.index(b"\n", at)
            name, size = content[at:end].split()
            at = end + 1 + int(size)
            self._parts[name.decode()] = content[end + 1 : at]
            self._packages.add(name.decode().rpartition(".")[0])

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        package, _, module = name.partition(".")
        if package == "agent" and (module in self._packages or module in self._parts):
            return ModuleSpec(name, self, is_package=module in self._packages)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: "ModuleType") -> None:
        name = module.__name__.partition(".")[2]
        if name not in self._packages:
            compiled = self._parts.get(name + "@" + MAGIC_NUMBER.hex())
            code = (
                marshal.loads(compiled)
                if compiled
                else compile(self._parts[name], "agent/" + name.replace(".", "/") + ".py", "exec")
            )
            exec(code, module.__dict__)


def take_channel() -> "tuple[int, int]":
    """Move the channel from standard input and output to new descriptors, and return these two (input first)."""
    nothing = posix.open("/dev/null", posix.O_RDWR)
    while nothing < 3:  # Occupy descriptor 2 if the sandbox has started the agent without standard error.
        nothing = posix.dup(nothing)
    ends = posix.dup(0), posix.dup(1)
    posix.dup2(nothing, 0)
    posix.dup2(nothing, 1)
    posix.close(nothing)
    return ends


def hello() -> bytes:
    """Return the frame that the agent sends first on each channel; it contains the version of the protocol."""
    text = b'{"hello": 3}'
    return len(text).to_bytes(4, "big") + bytes(4) + text


def require_modules() -> None:
    """Exit with an error if this Python lacks a part of the standard library, as Debian's python3-minimal does."""
    for name in ("_json", "_ctypes", "resource", "termios"):
        try:
            __import__(name)
        except ImportError:
            text = "the sandbox's Python lacks the module %s of the standard library; install the package python3\n"
            posix.write(2, (text % name).encode())
            posix._exit(1)


def boot() -> None:
    reader, writer = take_channel()
    require_modules()
    posix.write(writer, hello())
    sys.meta_path.insert(0, Finder(take(reader, int(take(reader, 9)))))
    sys.dont_write_bytecode = True
    main: Callable[[int, int, bytes], None] = __import__("agent.main").main.main
    main(reader, writer, hello())


if __name__ == "__main__":  # `BOOT` executes this file with the name "__main__".
    boot()
