"""The files of a run's metrics: a line of JSON for each epoch, and TensorBoard's events."""

import contextlib
import dataclasses
import functools
import importlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from .metrics import EpochMetrics

_logger = logging.getLogger(__name__)


class TensorBoardEvents:
    """TensorBoard's event files, written with the package tensorboard (no TensorFlow); ImportError if it is missing.

    Each start of a run adds a file to the folder, and TensorBoard joins the files into one curve. ``history``, the
    epochs before the checkpoint that the run resumed from, is written only if the folder has no event files yet. If an
    earlier start got further than the checkpoint, TensorBoard hides its epochs after the checkpoint.
    """

    def __init__(self, folder: Path, history: Sequence[EpochMetrics] = ()) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        continued = any(folder.glob("events.out.tfevents.*"))
        self._writer: Any = writer.EventFileWriter(str(folder))
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(len(history) + 1 if continued else 1, session_log=start)
        for metrics in () if continued else history:
            self.write(metrics)

    def write(self, metrics: EpochMetrics) -> None:
        values = [
            self._summaries.Summary.Value(tag=tag(name), simple_value=value)
            for name, value in dataclasses.asdict(metrics).items()
            if name != "epoch"
        ]
        self._add(metrics.epoch, summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **what))


def tag(name: str) -> str:
    """Return the name under which TensorBoard shows a metric.

    >>> tag("loss"), tag("test_loss"), tag("accuracy")
    ('loss/train', 'loss/test', 'accuracy/test')
    """
    if name.startswith("test_"):
        return f"{name.removeprefix('test_')}/test"
    return f"{name}/test" if name == "accuracy" else f"{name}/train"


class MetricsFiles:
    """The files into which a run writes the metrics of each epoch. Only rank 0 makes such an object.

    ``metrics`` is a file with a line of JSON for each epoch. The folder ``output`` gets the same lines in
    ``metrics.jsonl`` and, if the package tensorboard is installed, event files in ``tensorboard/``. The JSON files
    begin with the epochs of ``history`` and are flushed after every line. OSError if a file cannot be opened.
    """

    def __init__(self, metrics: Path | None, output: Path | None, history: Sequence[EpochMetrics] = ()) -> None:
        self._written = len(history)
        self._files: dict[Any, Callable[[EpochMetrics], object]] = {}
        """The open files, each with the function that writes an epoch's metrics into it."""
        for path in filter(None, (metrics, output and output / "metrics.jsonl")):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w", buffering=1)
            self._files[file] = functools.partial(_write_line, file)
            for each in history:
                _write_line(file, each)
        if output is not None:
            with contextlib.suppress(ImportError):
                events = TensorBoardEvents(output / "tensorboard", history)
                self._files[events] = events.write

    def write(self, history: Sequence[EpochMetrics]) -> None:
        """Write the epochs of ``history`` that are not written yet. An OSError, as on a full disk, is only logged."""
        for metrics in history[self._written :]:
            for write in self._files.values():
                try:
                    write(metrics)
                except OSError as error:
                    _logger.warning("epoch %d is missing in a file of metrics (%s)", metrics.epoch, error)
        self._written = len(history)

    def close(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()


def _write_line(file: IO[str], metrics: EpochMetrics) -> None:
    file.write(metrics.as_json() + "\n")
