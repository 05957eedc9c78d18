"""The cheap benchmarks run with their smallest settings; their results mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


def run(name: str, *words: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_benchmark_of_games_runs_and_says_which_peers_are_not_installed(tmp_path: Path) -> None:
    output = run("bench_text_games", "--peers", str(tmp_path / "python"))
    assert "  left out: GEM" in output
    assert f"there is no {tmp_path}/python; make .venv/bench/done" in output
    assert "  envkit" in output
    assert "Claims (not of a quick run)\n" in output


@pytest.mark.peers
def test_a_peer_plays_in_a_virtual_environment_without_envkit(peers_python: Path) -> None:
    output = run("bench_levels", "--peers", str(peers_python))
    assert "  gym-sokoban 8x8, 2 boxes    " in output.partition("levels per CPU-second")[2]
    assert "  left out: GEM 8x8, 2 boxes: No module named 'gem'" in output


@pytest.mark.bwrap
def test_many_sandboxes_answer_and_end() -> None:
    assert "lost meanwhile: 0; left afterwards: nothing" in run("bench_many_sandboxes", "--docker", "0")


@pytest.mark.bwrap
def test_sandboxes_on_busy_processors_are_watched() -> None:
    assert ", failed 0; " in run("bench_false_losses", "--docker", "0", "--minutes", "0.02")
