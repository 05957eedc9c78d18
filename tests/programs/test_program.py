"""Programs of the tests are forked even if the test imports torch."""

from __future__ import annotations

import subprocess

import torch._dynamo

import envkit.trainer_bridge
from tests.programs.program import SCRIPT, Program

IMPORTED = (torch._dynamo, envkit.trainer_bridge)  # this sets environment variables


def test_a_program_is_forked_from_the_process_that_has_imported_torch() -> None:
    with Program([SCRIPT, "list"], stdout=subprocess.PIPE) as program:
        output, _ = program.communicate(timeout=60)
    assert b"FrozenLake-v0" in output
    assert program._line is not None
