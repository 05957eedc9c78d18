"""Information about this installation of envkit: which optional packages it has, and which command line runs it.

Import optional packages with `load`. If the package is missing, the error contains the command that installs it.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoints
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envkit.errors import UsageError

EXTRAS: Mapping[str, Sequence[str]] = {
    "serve": ("fastapi", "httpx", "prometheus_client", "starlette", "uvicorn", "uvloop"),
    "train": (
        *("accelerate", "gguf", "huggingface_hub", "jinja2", "matplotlib", "peft", "safetensors"),
        *("tensorboard", "torch", "transformers"),
    ),
    "docker": ("docker", "requests"),
    "ray": ("ray",),
    "terminal": ("pyte",),
    "vllm": ("vllm",),
    "wandb": ("wandb",),
}
"""The packages, by import name, that each extra installs: ``serve`` stands for ``pip install "envkit[serve]"``."""


def entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group. They are read again once a folder of `sys.path` has changed."""
    return _entry_points(group, tuple((entry, _changed_ns(entry)) for entry in sys.path))


@lru_cache(maxsize=32)
def _entry_points(group: str, path: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Return the entry points of a group of the packages on `path`; reading them takes 10 to 20 ms."""
    return metadata.entry_points(group=group)


def _changed_ns(entry: str) -> int:
    try:
        return Path(entry).stat().st_mtime_ns
    except OSError:
        return 0


def load(module: str) -> Any:
    """Import an optional package, or a module of one, and return the module.

    Raises:
        UsageError: The package is not installed. The message contains the command that installs it.
    """
    if (why := why_missing(module.partition(".")[0])) is not None:
        raise UsageError(why)
    return importlib.import_module(module)


def late_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], Sequence[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of `package`.

    The first imports each name of `modules` when it is first used, and the second lists the package's ``__all__``.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    def public() -> Sequence[str]:
        names: Sequence[str] = sys.modules[package].__all__
        return names

    return find, public


def why_missing(package: str) -> str | None:
    """Return why an optional package is missing, and the command that installs it, as a message; None if installed.

    A folder with the package's name does not count as installed, although Python imports it as a namespace package.
    """
    spec = find_spec(package)
    if spec is not None and spec.origin is not None:
        return None
    folders = () if spec is None else tuple(spec.submodule_search_locations or ())
    return _remedy(package, f" (the folder {folders[0]} has the same name, but is not the package)" if folders else "")


def explain(error: ImportError) -> str | None:
    """Return the message to show if the import of an optional package failed; None if the package is not optional."""
    package = (error.name or "").partition(".")[0]
    if _extra_with(package) is None:
        return None
    return why_missing(package) or (_remedy(package) if isinstance(error, ModuleNotFoundError) else None)


def command(*words: str) -> str:
    """Return a command line for the current folder that runs this installation of envkit with arguments `words`."""
    program = Path(sys.executable).with_name("envkit")
    on_path = shutil.which("envkit")
    if on_path is not None and program.exists() and program.samefile(on_path):
        start = ["envkit"]
    elif program.exists():
        here = Path.cwd()
        start = [str(program.relative_to(here) if program.is_relative_to(here) else program)]
    else:
        start = [sys.executable, "-m", "envkit"]
    return shlex.join([*start, *words])


def _remedy(package: str, detail: str = "") -> str:
    return f'the package {package} is not installed{detail}; install it: pip install "envkit[{_extra_with(package)}]"'


def _extra_with(package: str) -> str | None:
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)
