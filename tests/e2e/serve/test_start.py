"""Start errors of ``envkit serve``: what is wrong and what to do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.programs.program import SCRIPT, Program, run
from tests.sandbox.containers import image


def error_of(state: Path, *words: str) -> str:
    """Return the error, a single line, of a server that fails to start."""
    command = [SCRIPT, "serve", "--state", str(state), "--set", "access_log=null", "--port", "0", *words]
    done = run(command, timeout=300)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return done.stderr.rstrip("\n")


def test_a_second_server_on_the_same_state_is_rejected_until_the_first_has_ended(tmp_path: Path) -> None:
    words = [SCRIPT, "serve", "--state", str(tmp_path), "--backend", "none", "--port", "0"]
    with Program(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline().startswith("ready ")
            holder = f"in use by another server (process {first.pid})"
            error = error_of(tmp_path, "--backend", "none")
            assert error == f"{tmp_path}: {holder}; stop it or choose another folder (--state)"
        finally:
            first.kill()
    with Program(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as second:
        try:
            assert second.stdout is not None
            assert second.stdout.readline().startswith("ready ")
        finally:
            second.kill()


def test_more_sandboxes_than_the_machine_holds_are_rejected(tmp_path: Path) -> None:
    node = "node={max_sandboxes: 3, memory_mib: 2048}"
    error = error_of(tmp_path, "--backend", "process", "--set", "envs.sandboxes=4", "--set", node)
    assert re.sub(r"[\d,]+ processes", "N processes", error) == (
        "envs: 4 sandboxes of 1024 MiB each exceed the capacity of this machine (3 sandboxes, 2,048 MiB of memory, "
        "N processes); lower envs.sandboxes or envs.memory_mib, or raise the limits in node"
    )


@pytest.mark.docker
def test_a_missing_image_is_reported_with_the_command_that_builds_it(tmp_path: Path) -> None:
    error = error_of(tmp_path, "--backend", "docker", "--set", "envs.image=no/such:1")
    remedies = "docker pull no/such:1, or envkit image build NAME --tag no/such:1"
    assert error.startswith(f"envs.image: there is no image 'no/such:1' here ({remedies})")


@pytest.mark.docker
def test_an_image_without_envkit_is_reported_with_the_command_that_builds_one(tmp_path: Path) -> None:
    error = error_of(tmp_path, "--backend", "docker", "--set", "envs.sandboxes=1", "--set", f"envs.image={image()}")
    assert error.startswith(f"image {image()} cannot serve environments: it lacks envkit or Python (")
    assert "No module named 'envkit')); build one with both: " in error
    assert error.endswith(
        f"envkit image build games --base {image()} --tag {image()}-envkit, and name it in envs.image"
    )
