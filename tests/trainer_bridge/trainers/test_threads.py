"""Torch threads: how they wait, their number, and its scope."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from envkit import clock, config
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.threads import torch_threads, wait_passively
from envkit.wiring.training.policy import playing_threads
from tests.trainer_bridge.models import open_model
from tests.trainer_bridge.trainees import KINDS, Trainee, draw_samples
from tests.trainer_bridge.watched import params


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch on a machine with two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


UNSET = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_DISPLAY_ENV")


def python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process whose OpenMP threads nobody has set."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=kept | env, capture_output=True, text=True, check=True)


UNTIL_TORCH = """
import os, sys
class UntilTorch:
    def find_spec(self, name, *_):
        if name == "torch.functional":  # torch imports it after its libraries, which have printed OpenMP's settings
            os._exit(0)
sys.meta_path.insert(0, UntilTorch())
"""
"""Ends a program when it has loaded torch's libraries, without torch's modules, which take seconds."""


def openmp(program: str) -> str:
    """Return the settings that OpenMP itself prints when `program` loads torch."""
    return python(UNTIL_TORCH + program, OMP_DISPLAY_ENV="verbose").stderr


@pytest.mark.parametrize(
    "start",
    [
        "import envkit.trainer_bridge.trainers.torch_local",
        "from envkit.wiring.evaluation import local_models; import envkit.trainer_bridge.engines.transformers",
    ],
)
def test_torch_starts_with_threads_that_sleep_while_they_wait(start: str) -> None:
    assert "GOMP_SPINCOUNT = '0'" in openmp(start)  # by default, a thread looks 300,000 times before it sleeps


@pytest.fixture
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable says how threads wait."""
    for name in UNSET:
        monkeypatch.setenv(name, "")  # so that its value is restored, whatever the test does
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("nothing_is_set")
def test_how_threads_wait_is_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    wait_passively()
    assert {name: os.environ[name] for name in UNSET if name in os.environ} == {"GOMP_SPINCOUNT": "5"}


@pytest.mark.usefixtures("nothing_is_set", "two_threads")
def test_a_program_that_loaded_torch_first_gets_a_warning_unless_it_has_a_single_thread() -> None:
    with pytest.warns(RuntimeWarning, match="Set this environment variable before Python starts"):
        wait_passively()
    assert os.environ.pop("OMP_WAIT_POLICY") == "passive"
    torch.set_num_threads(1)  # which waits for no other
    wait_passively()


@pytest.mark.parametrize(
    ("threads", "model", "expected"), [(0, None, 1), (3, None, 3), (0, "some/model", 0), (3, "some/model", 3)]
)
def test_a_tiny_policy_plays_with_one_thread_unless_the_file_says_more(
    threads: int, model: str | None, expected: int
) -> None:
    content = {"env": {"id": "FrozenLake-v0"}, "threads": threads, "engine": {"model": model}}
    assert playing_threads(config.parse(content)) == expected


@pytest.mark.usefixtures("two_threads")
def test_a_number_of_threads_holds_in_its_block_alone_and_0_leaves_it() -> None:
    with torch_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with torch_threads(0):
        assert torch.get_num_threads() == 2


def test_the_engine_generates_and_the_trainer_learns_with_its_own_number_of_threads(
    tiny_folder: Path, tmp_path: Path
) -> None:
    seen: list[int] = []

    def note(module: object, args: object) -> None:
        seen.append(torch.get_num_threads())

    played = open_model(tiny_folder)
    played.register_forward_pre_hook(note)
    engine = TransformersEngine(played, pad_id=0, threads=3)
    trainee = Trainee(tiny_folder, tmp_path, **KINDS["grpo"], threads=2)
    trainee.model.base_model.register_forward_pre_hook(note)

    async def main() -> None:
        await engine.generate([1, 5, 6], params(n=1))
        await trainee.trainer.accumulate(draw_samples(0, 4, tiny_folder))
        await trainee.trainer.update()

    clock.run(main)
    assert list(dict.fromkeys(seen)) == [3, 2]
