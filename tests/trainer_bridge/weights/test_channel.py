"""The channel of weights: order of the calls, what it measures, and the files that it keeps."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch

from envkit import clock
from envkit.errors import UsageError
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.weights.channel import Push, WeightChannel, weights_folder
from envkit.trainer_bridge.weights.files import checksum
from envkit.types import PauseMode, Weights
from tests.trainer_bridge.fakes import ScriptedEngine, ScriptedTrainer
from tests.trainer_bridge.models import open_model
from tests.trainer_bridge.trainees import Trainee, draw_samples


class RecordingEngine(ScriptedEngine):
    """Records its calls. Pausing and loading take a second each."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.log: list[object] = []
        self._fails = fails

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        self.log.append(mode)
        await anyio.sleep(1)

    async def resume(self) -> None:
        self.log.append("resume")

    async def load(self, weights: Weights) -> None:
        await anyio.sleep(1)
        if self._fails:
            raise RuntimeError("weights of another model")
        await super().load(weights)
        self.log.append(weights.version)


class Publisher(ScriptedTrainer):
    """Publishes given weights in turn; each takes a minute."""

    def __init__(self, *published: Weights) -> None:
        super().__init__()
        self._published = list(published)

    async def publish(self) -> Weights:
        await anyio.sleep(60)
        return self._published.pop(0)


def pushes(channel: WeightChannel, count: int = 1) -> list[Push]:
    async def main() -> list[Push]:
        return [await channel.push() for _ in range(count)]

    return clock.run(main, virtual=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_push_loads_while_the_engine_is_paused_and_counts_only_that_time() -> None:
    engine, mode = RecordingEngine(), PauseMode.KEEP
    (push,) = pushes(WeightChannel(Publisher(Weights(4, "", 7)), engine, mode=mode))
    assert engine.log == [mode, 4, "resume"]
    assert (push.weights, push.exposed_s) == (Weights(4, "", 7), 2.0)


class Fetching(RecordingEngine):
    """Fetching takes a minute."""

    async def fetch(self, weights: Weights) -> None:
        await anyio.sleep(60)
        self.log.append(f"fetch {weights.version}")


def test_an_engine_fetches_the_weights_before_it_is_paused() -> None:
    engine = Fetching()
    (push,) = pushes(WeightChannel(Publisher(Weights(4, "", 7)), engine))
    assert engine.log == ["fetch 4", PauseMode.WAIT, 4, "resume"]
    assert push.exposed_s == 2.0


def test_a_push_that_fails_resumes_the_engine() -> None:
    engine = RecordingEngine(fails=True)
    with pytest.raises(RuntimeError, match="weights of another model"):
        pushes(WeightChannel(Publisher(Weights(1, "")), engine))
    assert engine.log == [PauseMode.WAIT, "resume"]


def test_a_push_says_whether_the_weights_differ_from_those_before() -> None:
    published = [Weights(0, "", 5), Weights(1, "", 5), Weights(2, "", 6)]
    found = pushes(WeightChannel(Publisher(*published), RecordingEngine()), 3)
    assert [push.is_changed for push in found] == [True, False, True]


def test_a_file_is_kept_until_the_engine_has_loaded_a_newer_one(tmp_path: Path) -> None:
    files = [tmp_path / f"version-{version}.safetensors" for version in range(3)]
    for file in files:
        file.touch()
    seen: list[Sequence[str]] = []

    class LookingEngine(RecordingEngine):
        async def load(self, weights: Weights) -> None:
            seen.append(names(tmp_path))
            await super().load(weights)

    published = [Weights(version, str(file)) for version, file in enumerate(files)]
    found = pushes(WeightChannel(Publisher(*published, published[2]), LookingEngine()), 4)
    everything = [file.name for file in files]
    assert seen == [everything, everything, everything[1:], everything[2:]]
    assert names(tmp_path) == [files[2].name]  # the same one once more is not removed
    assert found[-1].weights == published[2]


class Freezable(RecordingEngine):
    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[ScriptedEngine | None]:
        yield ScriptedEngine()


def test_the_file_of_a_frozen_engine_is_kept_until_it_ends(tmp_path: Path) -> None:
    files = [tmp_path / f"version-{version}.safetensors" for version in range(3)]
    for file in files:
        file.touch()

    async def main() -> list[list[str]]:
        published = [Weights(version, str(file)) for version, file in enumerate(files)]
        channel = WeightChannel(Publisher(*published), Freezable())
        await channel.push()
        async with channel.frozen() as frozen:
            assert isinstance(frozen, ScriptedEngine)
            for _ in range(2):
                await channel.push()
            during = names(tmp_path)
        return [during, names(tmp_path)]

    first, _, last = (file.name for file in files)
    assert clock.run(main, virtual=True) == [[first, last], [last]]


def test_pushes_during_an_update_wait_for_its_weights(tiny_folder: Path, tmp_path: Path) -> None:
    trainee = Trainee(tiny_folder, tmp_path / "weights", preset="grpo", minibatches=8)
    playing = open_model(tiny_folder)
    engine = TransformersEngine(playing, pad_id=0)
    engine.copy_from(trainee.trainer.copy_to)
    samples = draw_samples(4, 32, tiny_folder)
    channel = WeightChannel(trainee.trainer, engine)

    async def main() -> None:
        await trainee.trainer.accumulate(samples)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainee.trainer.update)
            await anyio.wait_all_tasks_blocked()  # until the update runs
            found = [await channel.push() for _ in range(4)]
        expected = (1, checksum(trainee.model, torch.float32))
        assert [(push.weights.version, push.weights.checksum) for push in found] == [expected] * 4
        assert (await engine.health()).version == 1
        assert checksum(playing, torch.float32) == expected[1]

    clock.run(main)


def test_an_engine_that_copies_during_an_update_gets_the_weights_after_it(tiny_folder: Path) -> None:
    trainee = Trainee(tiny_folder, None, preset="grpo", minibatches=8)
    playing = open_model(tiny_folder)
    engine = TransformersEngine(playing, pad_id=0)
    engine.copy_from(trainee.trainer.copy_to)
    samples = draw_samples(4, 32, tiny_folder)

    async def main() -> None:
        published = await trainee.trainer.publish()
        await trainee.trainer.accumulate(samples)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainee.trainer.update)
            await anyio.wait_all_tasks_blocked()
            await engine.load(published)
        assert (await engine.health()).version == 1
        assert checksum(playing, torch.float32) == checksum(trainee.model, torch.float32)

    clock.run(main)


def test_the_folder_of_weights_is_in_memory_and_is_gone_after_a_run(tmp_path: Path) -> None:
    with weights_folder(tmp_path / "run", memory=tmp_path) as folder:
        (folder / "version-1.safetensors").touch()
        assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path, 0o700)
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_system_in_memory_weights_are_in_the_folder_of_the_run(tmp_path: Path) -> None:
    with weights_folder(tmp_path / "run", memory=tmp_path / "missing") as folder:
        assert folder == tmp_path / "run" / "weights"


def test_a_chosen_folder_has_the_weights_and_one_that_is_missing_is_an_error(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with pytest.raises(UsageError, match=r"engine.weights_folder: cannot write to .*/shared: No such file"):
        weights_folder(tmp_path / "run", chosen=str(shared)).__enter__()
    shared.mkdir()
    with (
        weights_folder(tmp_path / "run", chosen=str(shared)) as folder,
        weights_folder(tmp_path / "other", chosen=str(shared)) as other,
    ):
        assert folder.parent == other.parent == shared
        assert folder != other
    folder.mkdir()  # left by a killed run
    (folder / "version-1.safetensors").touch()
    with weights_folder(tmp_path / "run", chosen=str(shared)) as again:
        assert again == folder
        assert not again.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from envkit.trainer_bridge.weights.channel import weights_folder

with weights_folder(Path(sys.argv[1]), memory=Path(sys.argv[2])) as folder:
    (folder / "version-1.safetensors").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_weights_of_a_killed_run_are_removed_by_the_next_run_and_those_of_a_living_run_are_kept(
    tmp_path: Path,
) -> None:
    def folders() -> list[Path]:
        return sorted(tmp_path.iterdir())

    with weights_folder(tmp_path / "living", memory=tmp_path) as living:
        killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(tmp_path)])
        assert killed.returncode == -signal.SIGKILL
        assert len(folders()) == 2
        with weights_folder(tmp_path / "next", memory=tmp_path) as folder:
            assert folders() == sorted([living, folder])
