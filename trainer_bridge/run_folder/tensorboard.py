"""Event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from envkit.runs.files import writing


class EventFile:
    """A new TensorBoard event file; implements `envkit.protocols.Tracker`.

    Args:
        folder: TensorBoard's log folder; created if missing. The new file continues the earlier files in this folder.
        first_step: First train step of the new file. TensorBoard ignores values of this and later steps in older files.

    Raises:
        UsageError: The file cannot be written; `step` and `evaluation` raise this error, too.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a train step. Each value appears in TensorBoard as ``train/name``."""
        self._scalars("train", step, values)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, as ``evaluation/name``."""
        self._scalars("evaluation", step, values)

    def close(self) -> None:
        self._writer.close()

    def _scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)
            self._writer.flush()
