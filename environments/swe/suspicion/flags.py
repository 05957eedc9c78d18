"""Flags: words that a submission adds, and that could serve to deceive the grader; a person should look at them."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ..checkout import content_of

_MAX_FLAGS = 100
_NAMES = re.compile(r"/proc|import \*|\\[xuUN\d]|[\w.]+")
"""Matches dotted names, and the start of an escape sequence, which may hide a name."""
_TYPE = re.compile(r"\btype\b(?!\(\w+\)(?!\())")
"""Matches ``type``, but not where it only returns the type of a value."""
_USUAL = re.compile(
    r"_?(os\.(path|fspath|sep|linesep|PathLike)|sys\.(version_info|maxsize|byteorder|platform)|"
    r"io\.(StringIO|BytesIO|TextIOWrapper))\b"
)
_USUAL_MEMBERS = re.compile("__(init|name|doc|new|qualname|module|len|iter|repr|str|all|future)__")
_WORDS = frozenset(
    """os sys io posix builtins bltns importlib signal socket asyncio atexit bdb codecs concurrent ctypes faulthandler
    fileinput gc glob inspect linecache marshal mmap multiprocessing pathlib pdb pickle pkgutil runpy shutil site
    subprocess tempfile threading traceback tracemalloc unittest mock weakref zipimport pytest pluggy envkit
    sitecustomize usercustomize exec eval compile open breakpoint vars globals locals getattr setattr delattr memoryview
    license credits copyright attrgetter methodcaller make_dataclass new_class import_module coding exit excepthook
    pluginmanager HookImpl walk_stack settrace setprofile modules meta_path getframe current_frames argv fork kill
    environ f_back f_locals f_globals f_builtins f_code tb_frame gi_frame cr_frame ag_frame co_filename co_code
    /proc""".split()  # noqa: SIM905 - easier to read
)
"""Names, without leading underscores, with which a program reaches the frames, objects, files and processes of the one
that runs it, or runs text.
"""


def flags_of(tree: Path, changes: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the suspicious words that changed Python files have more often than before."""
    found = [
        f"{word} in {path}"
        for path, content in sorted(changes.items())
        for word in _suspicious(content) - _suspicious(content_of(tree, path))
    ]
    more = [f"{len(found) - _MAX_FLAGS} more"] if len(found) > _MAX_FLAGS else []
    return (*(one[:200] for one in found[:_MAX_FLAGS]), *more)


def _suspicious(content: bytes) -> Counter[str]:
    """Return how often each suspicious word occurs, in code, texts and comments."""
    text = unicodedata.normalize("NFKC", content.decode(errors="replace"))  # as Python does with names
    words = (word for name in _NAMES.findall(text) if not _USUAL.match(name) for word in name.split("."))
    return Counter([*filter(_is_suspicious, words), *_TYPE.findall(text)])


def _is_suspicious(word: str) -> bool:
    is_special = (word.startswith("__") or word.endswith("__")) and not _USUAL_MEMBERS.fullmatch(word)
    return is_special or word.lstrip("_") in _WORDS or word == "import *" or word[:1] == "\\"
