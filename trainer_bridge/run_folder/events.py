"""Event files for TensorBoard, written without torch, TensorFlow or a background thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from envkit import clock
from envkit.runs.files import writing

_BUCKETS = 30


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
            folder.mkdir(exist_ok=True)
            files = [path.suffix[1:] for path in folder.glob("events.out.tfevents.*")]
            number = max((int(suffix) for suffix in files if suffix.isdecimal()), default=0) + 1
            self._file = (folder / f"events.out.tfevents.{number:010d}").open("xb", buffering=0)
            self._records = RecordWriter(self._file)
            self._write(Event(file_version="brain.Event:2"))
            self._write(Event(session_log=SessionLog(status=SessionLog.START), step=first_step))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a train step. Each value appears in TensorBoard as ``train/name``."""
        self._scalars("train", step, values)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, as ``evaluation/name``."""
        self._scalars("evaluation", step, values)

    def durations(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Write a histogram of durations (s) for each name that has values, as ``seconds/name``."""
        found = {name: some for name, some in values.items() if len(some)}
        points = [Summary.Value(tag=f"seconds/{name}", histo=_histogram(some)) for name, some in found.items()]
        if points:
            with writing(self._folder):
                self._write(Event(step=step, summary=Summary(value=points)))

    def close(self) -> None:
        self._file.close()

    def _scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        points = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in values.items()]
        with writing(self._folder):
            self._write(Event(step=step, summary=Summary(value=points)))

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
