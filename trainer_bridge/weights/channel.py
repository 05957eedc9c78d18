"""The channel that brings new weights from a trainer to an engine.

This module does not import torch.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import anyio

from envkit import clock
from envkit.errors import UsageError
from envkit.protocols import Engine, FetchingEngine, FreezableEngine, PolicyEngine, Trainer
from envkit.types import PauseMode, Weights, stable_hash

from ..engines.vllm.plugin.envkit_fetch import MEMORY, locked_folder


@dataclass(frozen=True, slots=True)
class Push:
    """A finished push.

    Attributes:
        weights: The weights that were published. An engine that copies them within this process may have newer ones,
            if an update ended in between.
        is_changed: Whether they differ from those of the previous push, in the engine's number format; true for the
            first push.
        exposed_s: Seconds in which the engine generated nothing because of the push.
    """

    weights: Weights
    is_changed: bool
    exposed_s: float


class WeightChannel:
    """Publishes the trainer's weights and loads them into the engine.

    A file or folder is kept until the engine has loaded a newer one, and while a frozen engine has its weights.

    `mode` says what happens to completions that are being generated during a push.
    """

    def __init__(self, trainer: Trainer, engine: PolicyEngine, *, mode: PauseMode = PauseMode.WAIT) -> None:
        self._trainer = trainer
        self._engine = engine
        self._mode = mode
        self._current: Weights | None = None
        self._frozen: Weights | None = None

    async def push(self) -> Push:
        """Publish, let the engine fetch what is far away, pause it, load, and resume it."""
        weights = await self._trainer.publish()
        if isinstance(self._engine, FetchingEngine):
            await self._engine.fetch(weights)
        began = clock.now()
        try:
            await self._engine.pause(self._mode)
            await self._engine.load(weights)
        finally:
            with anyio.CancelScope(shield=True):
                await self._engine.resume()
        exposed_s = clock.now() - began
        before, self._current = self._current, weights
        if before is not self._frozen:
            await self._remove_old(before)
        return Push(weights, before is None or before.checksum != weights.checksum, exposed_s)

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[Engine | None]:
        """Open an engine that has the weights of the last push during the block; None if the engine cannot do that."""
        if not isinstance(self._engine, FreezableEngine):
            yield None
            return
        frozen = self._frozen = self._current
        try:
            async with self._engine.frozen() as engine:
                yield engine
        finally:
            self._frozen = None
            await self._remove_old(frozen)

    async def _remove_old(self, weights: Weights | None) -> None:
        if weights and weights.location and self._current and weights.location != self._current.location:
            await clock.to_thread(_remove, Path(weights.location))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def weights_folder(run_folder: Path, *, chosen: str | None = None, memory: Path = MEMORY) -> Iterator[Path]:
    """Yield the path of a folder for the weight files of a run. It need not exist, and is removed at the end.

    It is in the folder `chosen`, where a resumed run removes what it left when it was killed. If `chosen` is None, it
    is a private folder in memory, or else one in the folder of the run. What killed runs of this user have left in
    memory is removed.

    Raises:
        UsageError: `chosen` does not exist or cannot be written.
    """
    with ExitStack() as opened:
        folder = run_folder / "weights"
        if chosen is not None:
            # Machines that share a folder may each have a run in a folder of the same name.
            name = stable_hash(platform.node(), str(run_folder.absolute()))
            folder = Path(chosen).absolute() / f"envkit-weights-{name:016x}"
            try:
                TemporaryFile(dir=folder.parent).close()
            except OSError as error:
                why = f"cannot write to {folder.parent}: {error.strerror}"
                raise UsageError(f"engine.weights_folder: {why}") from error
        shutil.rmtree(folder, ignore_errors=True)
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        if chosen is None:
            with suppress(OSError):
                folder = opened.enter_context(locked_folder(memory, f"envkit-weights-{os.geteuid()}-"))
        yield folder
