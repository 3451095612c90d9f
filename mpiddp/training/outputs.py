"""Files that take what is known after every epoch: JSON lines, CSV, and events for TensorBoard. For one rank only."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from .metrics import EpochMetrics
from .trainer import Trainer

_logger = logging.getLogger(__name__)


class EpochFile(Protocol):
    """A file that takes the metrics of one epoch after the other."""

    def write(self, metrics: EpochMetrics) -> None:
        """Write what is known after an epoch, and hand it to the system."""

    def close(self) -> None:
        """Close the file."""


class _Lines:
    """A text file, complete after every line.

    Parameters
    ----------
    path : Path
        The file; begun anew, its folder is made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Lines end as they are written, which csv insists on.
        self._file = path.open("w", newline="")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonLines(_Lines):
    """A file of one JSON object per line."""

    def write(self, metrics: EpochMetrics) -> None:
        """Write one line and hand it to the system."""
        self._file.write(metrics.as_json() + "\n")
        self._file.flush()


class CsvLines(_Lines):
    """A table for spreadsheets: a line of names, and one of values for each epoch; what is unknown is empty."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._writer = csv.DictWriter(self._file, [field.name for field in dataclasses.fields(EpochMetrics)])
        self._writer.writeheader()
        self._file.flush()

    def write(self, metrics: EpochMetrics) -> None:
        """Write one line and hand it to the system."""
        self._writer.writerow(dataclasses.asdict(metrics))
        self._file.flush()


class TensorBoardEvents:
    """Event files that TensorBoard draws; needs the package ``tensorboard``, and neither torch nor TensorFlow.

    Parameters
    ----------
    folder : Path
        Where they are. Every start of a run adds one; TensorBoard shows them as one curve.
    history : sequence of EpochMetrics
        Epochs before a checkpoint, written where the folder has no events of them. Whatever an earlier start has
        written of later epochs, which are trained again now, TensorBoard no longer shows.

    Raises
    ------
    ImportError
        If ``tensorboard`` is not installed.
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
        """Write an event for each number, at the epoch's number, and hand them to the system."""
        numbers = {name: value for name, value in dataclasses.asdict(metrics).items() if value is not None}
        values = [
            self._summaries.Summary.Value(tag=tag(name), simple_value=value)
            for name, value in numbers.items()
            if name != "epoch"
        ]
        self._add(metrics.epoch, summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **what))


def tag(name: str) -> str:
    """Return what TensorBoard calls a number: that of a pass over test data has its name after the slash.

    Examples
    --------
    >>> tag("loss"), tag("test_loss"), tag("accuracy")
    ('loss/train', 'loss/test', 'accuracy/test')
    """
    if name.startswith("test_"):
        return f"{name.removeprefix('test_')}/test"
    return f"{name}/test" if name == "accuracy" else f"{name}/train"


class Outputs:
    """All files of a run that take its epochs; `epoch_end` is a callback for a `Trainer` on rank 0.

    Parameters
    ----------
    metrics : Path, optional
        A file of JSON lines.
    output : Path, optional
        The run's folder: gets ``metrics.jsonl``, ``metrics.csv`` and, with tensorboard installed, ``tensorboard/``.
    history : sequence of EpochMetrics
        Epochs before a checkpoint, which the files begin with.

    Raises
    ------
    OSError
        If a file cannot be opened or written.
    """

    def __init__(self, metrics: Path | None, output: Path | None, history: Sequence[EpochMetrics] = ()) -> None:
        files: list[EpochFile] = [JsonLines(metrics)] if metrics is not None else []
        if output is not None:
            files += [JsonLines(output / "metrics.jsonl"), CsvLines(output / "metrics.csv")]
        for file in files:
            for each in history:
                file.write(each)
        self._files = files
        self._written = len(history)
        if output is not None:
            with contextlib.suppress(ImportError):
                self._files.append(TensorBoardEvents(output / "tensorboard", history))

    def epoch_end(self, trainer: Trainer) -> None:
        """Write what has been added to the history; what cannot be, as on a full disk, does not stop the training."""
        for metrics in trainer.history[self._written :]:
            for file in self._files:
                try:
                    file.write(metrics)
                except OSError as error:
                    _logger.warning("epoch %d is missing in a %s (%s)", metrics.epoch, type(file).__name__, error)
        self._written = len(trainer.history)

    def close(self) -> None:
        """Close the files; `epoch_end` has said what could not be written."""
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
