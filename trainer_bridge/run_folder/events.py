"""Event files for TensorBoard, written without torch, TensorFlow or a background thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from envkit import clock

_BUCKETS = 30


class EventFile:
    """A new TensorBoard event file in an existing folder.

    Args:
        folder: TensorBoard's log folder. The new file continues the earlier files in this folder.
        first_step: First train step of the new file. TensorBoard ignores values of this and later steps in older files.

    Raises:
        OSError: The file cannot be written; `scalars` raises this error, too.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        numbers = [int(path.suffix[1:]) for path in folder.glob("events.out.tfevents.*") if path.suffix[1:].isdecimal()]
        path = folder / f"events.out.tfevents.{max(numbers, default=0) + 1:010d}"
        self._file = path.open("xb", buffering=0)
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(session_log=SessionLog(status=SessionLog.START), step=first_step))

    def scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a train step. Each value appears in TensorBoard as ``group/name``."""
        points = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=points)))

    def histograms(self, group: str, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Write the distributions of values of a train step, as ``group/name``; names without values are left out."""
        found = {name: some for name, some in values.items() if len(some)}
        points = [Summary.Value(tag=f"{group}/{name}", histo=_histogram(some)) for name, some in found.items()]
        if points:
            self._write(Event(step=step, summary=Summary(value=points)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = clock.wall()
        self._records.write(event.SerializeToString())


def _histogram(values: Sequence[float]) -> HistogramProto:
    numbers = np.asarray(values, dtype=np.float64)
    counts, edges = np.histogram(numbers, bins=_BUCKETS)
    return HistogramProto(
        min=numbers.min(),
        max=numbers.max(),
        num=len(numbers),
        sum=numbers.sum(),
        sum_squares=np.square(numbers).sum(),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
