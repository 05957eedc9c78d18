"""Runs a command of envkit, in a process of its own or in this one."""

from __future__ import annotations

import os
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest.mock import patch

import pytest

from envkit import cli
from tests.programs.program import SCRIPT, run


def envkit(*words: str | Path, cwd: Path | None = None, stdin: str = "", **env: str) -> tuple[int, str, str]:
    """Run a command; `env` are further environment variables. Return its exit code, output and errors."""
    done = run([SCRIPT, *words], cwd=cwd, input=stdin, env={**os.environ, **env}, timeout=600)
    return done.returncode, done.stdout, done.stderr


def called(*words: str | Path, cwd: Path | None = None, **env: str) -> tuple[int, str, str]:
    """Run a command as `envkit` does, but in this process: Python need not start and import torch again."""
    output, errors = (TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        patch.dict(os.environ, env),
        chdir(cwd or Path()),
        redirect_stdout(output),
        redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    for stream in (output, errors):
        stream.seek(0)
    return ended.value.code, output.read(), errors.read()
